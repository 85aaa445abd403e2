"""Scratch space of a stage, bound to its code, inputs and parameters, for bit-identical resumes."""

from collections.abc import Callable
from pathlib import Path

from grpo.runtime.artifacts.files import atomic_path, remove

WORK = Path(".work")
CODE = (Path("grpo"), Path("stages"))  # what any of a stage's bytes may depend on


class Scratch:
    """`.work/STAGE/FINGERPRINT`: other code, inputs or parameters never see what lies there."""

    def __init__(self, stage: str, fingerprint: str, *, part: str = "") -> None:
        self._stage = WORK / stage
        self.directory = self._stage / fingerprint[:32] / part

    def latest(self) -> tuple[int, Path] | None:
        """Returns the number and path of the newest whole checkpoint."""
        found = sorted(self.directory.glob("checkpoint-*"))
        return (int(found[-1].name.rpartition("-")[2]), found[-1]) if found else None

    def save(self, number: int, write: Callable[[Path], None]) -> None:
        """Writes checkpoint `number` atomically and drops the older ones."""
        older = list(self.directory.glob("checkpoint-*"))
        with atomic_path(self.directory / f"checkpoint-{number:08d}") as temporary:
            temporary.mkdir()
            write(temporary)
        for path in older:
            remove(path)

    def within(self, part: str) -> "Scratch":
        """Returns the scratch of one part of the stage; clearing either clears both."""
        return Scratch(self._stage.name, self.directory.name, part=part)

    def clear(self) -> None:
        """Removes all scratch of the stage, that of other fingerprints too."""
        remove(self._stage)
