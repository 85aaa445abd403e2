"""Measures the base policy's outcome rate on every training prompt."""

from dataclasses import asdict
from pathlib import Path

from grpo.errors import ArtifactError, brief
from grpo.runtime.artifacts.files import atomic_path, read_json, write_json
from grpo.runtime.artifacts.tables import PROFILE, ROLLOUTS, empty_table, write_table
from grpo.runtime.artifacts.usage import Usage
from grpo.types import Cost
from stages.entry import run


def main(usage: Usage, needed: Path, judge: Path, policy: Path, prompts: Path, out: Path) -> None:
    """Writes prompts.parquet (one row per prompt), summary.json and the judged rollouts.

    Args:
      needed: File that tells whether an arm reads the profile; if not, all outputs are empty.
      judge: Manifest of the judge's files, written by the stage check.
    """
    if not _is_needed(needed):
        _write_none(out)
        return
    # Imported here: it takes seconds and is often not needed.
    from stages.sampled_profile import write_profile

    write_profile(usage, judge, policy, prompts, out)


def _is_needed(path: Path) -> bool:
    """Returns whether an arm reads the profile, as the stage check wrote it.

    Raises:
      ArtifactError: If the file is missing or has other content.
    """
    match found := read_json(path):
        case {"needed": bool(is_needed)}:
            return is_needed
    raise ArtifactError(
        f'{path}: must be {{"needed": true}} or {{"needed": false}}, got {brief(repr(found))}; '
        "rerun the stage check"
    )


def _write_none(out: Path) -> None:
    """Writes a profile without rollouts, at no cost."""
    with atomic_path(out / "rollouts") as temporary:
        write_table(empty_table(ROLLOUTS), temporary / "table.parquet", ROLLOUTS, allow_empty=True)
    write_table(empty_table(PROFILE), out / "prompts.parquet", PROFILE, allow_empty=True)
    write_json(out / "summary.json", {"cost": asdict(Cost()), "rollouts": 0})


if __name__ == "__main__":
    run(main, stage="profile")
