"""Comparison of finished runs, each a workspace or a git revision of this one, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError
from grpo.lineage.lock import LOCK, cached_path, flatten
from grpo.lineage.revision import git
from grpo.params.yaml import parse_yaml
from grpo.report.words import format_change, format_flops, format_rate
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.marks import ARTIFACTS
from grpo.schema import PARAMS

METRICS = ARTIFACTS / "report" / "metrics.json"
ABSENT = "absent"
# Begin the parameters that change what a reward means.
EVALUATED = (
    *("task.", "reward.", "evaluation.rollouts_per_prompt"),
    *("evaluation.sampling.", "evaluation.judges"),
)
SPACES = str.maketrans("\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}", "  ")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """What a comparison shows of a run."""

    name: str  # as given: a directory or a revision
    metrics: dict[str, Any]  # content of metrics.json
    params: dict[str, Any]  # leaves by path, as the stages ran with them


def read_compared_run(name: str, workspace: Path = Path()) -> ComparedRun:
    """Returns a run in a directory, or that of a git revision of the workspace.

    The metrics of a revision come from DVC's cache.

    Raises:
      ArtifactError: If neither exists, or the run has no metrics.
    """
    directory = workspace / name
    if directory.is_dir():
        lock = directory / LOCK
        given = directory / PARAMS
        text = lock.read_text(encoding="utf-8") if lock.exists() else ""
        params = _leaves_of_lock(text) if text else flatten(parse_yaml(given.read_text()))
        return ComparedRun(name=name, metrics=read_json(directory / METRICS), params=params)
    if not git(workspace, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
        raise ArtifactError(f"{name}: must be a directory or a git revision; git log lists those")
    text = git(workspace, "show", f"{name}:./{LOCK}")
    digest = _digest_of_metrics(text)
    if digest is None:
        raise ArtifactError(f"{name}: its {LOCK} has no {METRICS}; commit {LOCK} after dvc repro")
    path = cached_path(workspace, digest)
    if not path.exists():
        raise ArtifactError(f"{name}: {path} is missing; run dvc fetch, or compare directories")
    return ComparedRun(name=name, metrics=read_json(path), params=_leaves_of_lock(text))


def describe_comparison(runs: Sequence[ComparedRun]) -> str:
    """Returns a table of rewards and costs, and the parameters that differ.

    The last column is the difference in mean at k to the same arm of the first run. Runs may have
    other prompts or seeds, so that it has no interval.
    """
    rows = [("run", "arm", "k", "mean@k", "interval", "over base", "compute", "against first")]
    first = runs[0].metrics["arms"]
    for run in runs:
        for arm, each in run.metrics["arms"].items():
            mean, gain = each["mean_at_k"], each["gain_over_base"]
            change = ABSENT
            if arm in first:
                change = format_change(mean["value"] - first[arm]["mean_at_k"]["value"])
            rows.append(
                (
                    run.name,
                    arm,
                    str(run.metrics["k"]),
                    format_rate(mean["value"]),
                    f"{format_rate(mean['low'])} to {format_rate(mean['high'])}",
                    format_change(gain["value"]),
                    format_flops(float(each["cost"]["flops"])),
                    "" if run is runs[0] else change,
                )
            )
    changed = differing_parameters(runs)
    lines = [*_columns(rows), "", *_columns(_parameter_rows(runs, changed))]
    about_reward = [path for path in changed if path.startswith(EVALUATED)]
    if about_reward:
        lines += ["", f"Rewards are not comparable, since these differ: {', '.join(about_reward)}."]
    return "\n".join(lines).translate(SPACES)


def differing_parameters(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Returns the values by run of each parameter that is not the same in all of them."""
    paths = dict.fromkeys(path for run in runs for path in run.params)
    values = {path: [str(run.params.get(path, ABSENT)) for run in runs] for path in sorted(paths)}
    return {path: each for path, each in values.items() if len(set(each)) > 1}


def _parameter_rows(
    runs: Sequence[ComparedRun], changed: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    if not changed:
        return [("All parameters are equal.",)]
    return [
        ("parameter", *(run.name for run in runs)),
        *((path, *values) for path, values in changed.items()),
    ]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _stages(text: str) -> dict[str, Any]:
    content = parse_yaml(text)
    return dict(content.get("stages") or {}) if isinstance(content, dict) else {}


def _leaves_of_lock(text: str) -> dict[str, Any]:
    """Returns the leaves of all parameters in the text of a dvc.lock.

    DVC keeps the entries of rounds and arms that were removed, which are left out.
    """
    stages = _stages(text)
    of_report = _params(stages.get("report", {}))
    there = {*of_report.get("rounds", {}), *of_report.get("arms", {})}
    leaves: dict[str, Any] = {}
    for name, stage in stages.items():
        _, _, key = name.partition("@")
        if key and there and key not in there:
            continue
        for path, value in _params(stage).items():
            leaves |= flatten(value, path)
    return leaves


def _params(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = stage.get("params", {}).get(str(PARAMS), {})
    return found


def _digest_of_metrics(text: str) -> str | None:
    """Returns the digest of metrics.json in the text of a dvc.lock, or None."""
    outs = [out for stage in _stages(text).values() for out in stage.get("outs", [])]
    found = [out.get("md5") for out in outs if out.get("path") == METRICS.as_posix()]
    return str(found[0]) if found else None
