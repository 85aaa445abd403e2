"""A few rollouts per round to read: one solved, one not solved, one that could not be parsed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from grpo.artifacts.tables import PROMPTS, read_table
from grpo.errors import ArtifactError
from grpo.report.reading import Run

SOLVED = 1.0  # the outcome of a rollout that the judge accepts
CHOICES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "solved": lambda rows: rows["outcome"] == SOLVED,
    "not solved": lambda rows: (rows["status"] == "scored") & (rows["outcome"] < SOLVED),
    "unparsable": lambda rows: rows["status"] == "unparsable",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout; `kind` is one of CHOICES."""

    kind: str
    rollout_id: str
    prompt: str
    text: str
    is_finished: bool
    outcome: float
    reward: float
    advantage: float
    group_rate: float  # mean outcome of its group
    group_size: int


def read_samples(artifacts: Path, run: Run) -> dict[str, list[Sample]]:
    """Returns the samples of every round, each the one of its kind with the most credit.

    Raises:
      ArtifactError: If the training prompts are missing or other ones.
    """
    path = artifacts / "prompts" / "train.parquet"
    prompts = read_table(path, PROMPTS).set_index("prompt_id")["prompt"]
    samples = {}
    for name, rollouts in run.rollouts.items():
        unknown = set(rollouts["prompt_id"]) - set(prompts.index)
        if unknown:
            raise ArtifactError(
                f"{path}: must hold prompt_id={min(unknown)!r} of the round {name}; "
                "run the stage prepare and what follows"
            )
        samples[name] = _choose(rollouts.join(prompts, on="prompt_id"))
    return samples


def _choose(rollouts: pd.DataFrame) -> list[Sample]:
    groups = rollouts.groupby("prompt_id")["outcome"]
    rows = rollouts.assign(
        rate=groups.transform("mean"),
        size=groups.transform("size"),
        gain=rollouts["advantage"].abs(),
    ).sort_values(["gain", "rollout_id"], ascending=[False, True])
    samples = []
    for kind, matches in CHOICES.items():
        samples += [
            Sample(
                kind=kind,
                rollout_id=row["rollout_id"],
                prompt=visible(row["prompt"]),
                text=visible(row["text"]),
                is_finished=bool(row["is_finished"]),
                outcome=float(row["outcome"]),
                reward=float(row["reward"]),
                advantage=float(row["advantage"]),
                group_rate=float(row["rate"]),
                group_size=int(row["size"]),
            )
            for row in rows[matches(rows)].head(1).to_dict("records")
        ]
    return samples


def visible(text: str) -> str:
    """Returns the text with control characters spelled out, line ends kept."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
