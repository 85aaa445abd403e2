"""Which paths a stage writes: those that dvc.yaml gives to its outs."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from grpo.errors import ArtifactError
from grpo.params.recorded import read_stages

INTERPOLATION = re.compile(r"\$\{[^}]*\}")


def require_own_outs(stage: str, paths: Mapping[str, Path]) -> None:
    """Refuses to replace what is no output of the stage.

    Under dvc there is nothing to refuse: it removes a stage's outs before it runs the stage.

    Args:
      stage: The module's name.
      paths: By parameter of the stage, in order; the name of an output ends in "out".

    Raises:
      ArtifactError: If a file or directory is at the path of an output, and it is an input, too,
        or dvc.yaml lets no stage of this module write it.
    """
    for name, path in paths.items():
        if name.endswith("out"):
            _require_no_link(path)
    there = [
        (position, path)
        for position, (name, path) in enumerate(paths.items())
        if name.endswith("out") and path.exists()
    ]
    if not there:
        return
    commands = _commands(stage)
    for position, path in there:
        usual = {words[position] for words in commands if position < len(words)}
        is_read = list(paths.values()).count(path) > 1
        if is_read or not any(_may_be(os.path.relpath(path), each) for each in usual):
            raise ArtifactError(
                f"{path}: exists and is not an output of stage {stage}, which writes "
                f"{' or '.join(sorted(usual)) or 'nothing'}; correct the path, or delete the file"
            )


def _require_no_link(path: Path) -> None:
    """Refuses an output that a link puts outside the workspace, before any compute is spent."""
    here = Path.cwd().resolve()
    if not path.is_absolute() and not path.parent.resolve().is_relative_to(here):
        raise ArtifactError(
            f"{path}: must lie in the workspace, a link leads to {path.parent.resolve()}, and DVC "
            "refuses outputs behind links; for a larger disk run dvc cache dir DIRECTORY and dvc "
            "config cache.type symlink instead"
        )


def _commands(stage: str) -> list[list[str]]:
    """Returns the paths that each stage of dvc.yaml gives to a module."""
    words = [each.get("do", each).get("cmd", "").split() for each in read_stages().values()]
    return [each[3:] for each in words if each[1:3] == ["-m", f"stages.{stage}"]]


def _may_be(path: str, usual: str) -> bool:
    """Returns whether a path is one that dvc.yaml spells with interpolations."""
    parts = map(re.escape, INTERPOLATION.split(usual))
    return re.fullmatch("[^/]+".join(parts), path) is not None
