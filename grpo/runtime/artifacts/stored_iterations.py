"""The files of a round's iterations: the first one's rollouts and rewards, and the later ones."""

from dataclasses import dataclass
from pathlib import Path

from grpo.errors import ArtifactError, brief
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import (
    REWARDS_FILE,
    ROLLOUTS_FOLDER,
    SUMMARY,
    TABLE,
    TENSORS,
    is_count,
    iteration_name,
)


@dataclass(frozen=True, kw_only=True)
class IterationFiles:
    """Where the rollouts, the rewards and the record of training of one iteration lie."""

    round: str
    index: int  # from 0
    total: int  # iterations of the round
    rollouts: Path  # directory
    rewards: Path
    record: Path  # directory of credit.parquet, steps.csv and phases.csv

    @property
    def table(self) -> Path:
        """The table of the rollouts."""
        return self.rollouts / TABLE

    @property
    def tensors(self) -> Path:
        """The tensors of the rollouts; later iterations may be stored without them."""
        return self.rollouts / TENSORS

    @property
    def credit(self) -> Path:
        """The table of what the updates used."""
        return self.record / "credit.parquet"

    def __str__(self) -> str:
        return f"iteration {self.index + 1} of {self.total}"


def first_iteration(artifacts: Path, name: str, *, total: int = 1) -> IterationFiles:
    """Returns the files of a round's first iteration, which need not be trained yet."""
    return IterationFiles(
        round=name,
        index=0,
        total=total,
        rollouts=artifacts / "rollouts" / name,
        rewards=artifacts / "rewards" / f"{name}.parquet",
        record=artifacts / "training" / name,
    )


def iterations_of(artifacts: Path, name: str) -> list[IterationFiles]:
    """Returns the files of all iterations of a trained round, in order.

    Raises:
      ArtifactError: If the summary of the round's training is missing or invalid.
    """
    trained = artifacts / "training" / name
    total = count_iterations(trained / SUMMARY)
    later = [
        IterationFiles(
            round=name,
            index=index,
            total=total,
            rollouts=trained / iteration_name(index) / ROLLOUTS_FOLDER,
            rewards=trained / iteration_name(index) / REWARDS_FILE,
            record=trained / iteration_name(index),
        )
        for index in range(1, total)
    ]
    return [first_iteration(artifacts, name, total=total), *later]


def count_iterations(summary: Path) -> int:
    """Returns the number of iterations in a round's training summary; without one, it is 1."""
    content = read_json(summary)
    total = content.get("iterations", 1) if isinstance(content, dict) else None
    if not is_count(total) or not total:
        raise ArtifactError(
            f"{summary}: iterations must be a whole number >= 1, got {brief(repr(total))}; rerun "
            "the stage train"
        )
    return int(total)
