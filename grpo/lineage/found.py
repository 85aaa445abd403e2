"""Finds a rollout or a prompt in the rounds behind an artifact, with its iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from grpo.errors import ArtifactError, brief
from grpo.lineage.trace import Node
from grpo.runtime.artifacts.marks import ARTIFACTS
from grpo.runtime.artifacts.stored_iterations import IterationFiles, iterations_of
from grpo.runtime.artifacts.tables import (
    CREDIT,
    FIRST_ANSWER,
    FIRST_SCORE,
    REWARDS,
    ROLLOUTS,
    SCORE,
    read_tables,
)

TRAIN = "train@"


@dataclass(frozen=True, kw_only=True)
class FoundRollout:
    """A rollout of a round: where it is stored, how it was judged and which update used it."""

    files: IterationFiles
    row: int  # in its table
    rollout_id: str
    reward: float
    outcome: float
    status: str
    scores: dict[str, float]  # by judge, if there are several
    revises: str  # the first answer of its group, if it was sampled from one, and its score
    advantage: float
    update: int | None  # None: no update used it

    def __str__(self) -> str:
        used = (
            "in no update"
            if self.update is None
            else f"advantage {self.advantage:+.3f} in update {self.update}"
        )
        scores = "".join(f", {judge} {score:.3f}" for judge, score in self.scores.items())
        return (
            f"{self.files.round}, {self.files}: {self.rollout_id} in row {self.row} of "
            f"{self.files.table}; {self.revises}{self.status}{scores}, outcome {self.outcome:g}, "
            f"reward {self.reward:.3f}, {used}"
        )


def find_rollouts(root: Node, identity: str, workspace: Path = Path()) -> list[FoundRollout]:
    """Returns a rollout, or all rollouts of a prompt, in the rounds behind an artifact.

    A rollout's id has its prompt's id, so several iterations may have the same one.

    Args:
      identity: A rollout_id or a prompt_id, also without the "train-" that stage prepare puts in
        front of a task's own ids.

    Raises:
      ArtifactError: If no round behind the artifact has it, or a file is missing or broken.
    """
    names = [each.removeprefix(TRAIN) for each in _rounds(root)]
    found = [
        rollout
        for name in names
        for rollout in _in_round(iterations_of(workspace / ARTIFACTS, name), identity)
    ]
    if not found:
        where = ", ".join(names) if names else "none"
        raise ArtifactError(
            f"{brief(identity)}: must be a rollout_id or prompt_id of a round behind "
            f"{root.artifact.path}, which are {where}"
        )
    return found


def _rounds(root: Node) -> list[str]:
    """Returns the stages in the graph of `root` that trained a round, the earliest first."""
    stages = [each.stage.name for each in root.walk() if each.stage]
    return list(dict.fromkeys(each for each in reversed(stages) if each.startswith(TRAIN)))


def _in_round(files: list[IterationFiles], identity: str) -> Iterator[FoundRollout]:
    tables = read_tables([each.table for each in files], ROLLOUTS)
    names = [identity, f"train-{identity}"]
    matches = [
        table[table["rollout_id"].isin(names) | table["prompt_id"].isin(names)] for table in tables
    ]
    hit = [(each, rows) for each, rows in zip(files, matches, strict=True) if len(rows)]
    if not hit:
        return
    rewards = read_tables([each.rewards for each, _ in hit], REWARDS)
    credit = read_tables([each.credit for each, _ in hit], CREDIT)
    for (each, rows), judged, used in zip(hit, rewards, credit, strict=True):
        yield from _describe(each, rows, judged, used)


def _describe(
    files: IterationFiles, rows: pd.DataFrame, rewards: pd.DataFrame, credit: pd.DataFrame
) -> Iterator[FoundRollout]:
    judged = rewards.set_index("rollout_id").to_dict("index")
    used = credit.set_index("rollout_id").to_dict("index")
    for (row, name), revises in zip(rows["rollout_id"].items(), _revised(rows), strict=True):
        if name not in judged:
            raise ArtifactError(f"{files.rewards}: must score {name!r} of {files.table}")
        in_update = used.get(name)
        yield FoundRollout(
            files=files,
            row=int(str(row)),
            rollout_id=name,
            reward=float(judged[name]["reward"]),
            outcome=float(judged[name]["outcome"]),
            status=str(judged[name]["status"]),
            scores={
                str(each).removeprefix(SCORE): float(score)
                for each, score in judged[name].items()
                if str(each).startswith(SCORE)
            },
            revises=revises,
            advantage=float(in_update["advantage"]) if in_update else 0.0,
            update=int(in_update["update"]) if in_update else None,
        )


def _revised(rows: pd.DataFrame) -> list[str]:
    """Returns what to say of the first answer that each rollout revises; empty if there is none."""
    if FIRST_SCORE not in rows:
        return [""] * len(rows)
    return [
        "" if pd.isna(score) else f"revises {brief(answer)!r} of score {score:.3f}; "
        for answer, score in zip(rows[FIRST_ANSWER], rows[FIRST_SCORE], strict=True)
    ]
