"""Example rollouts per round: one solved, one not solved, one unparsable.

Of a round with several iterations, the first and the last one have theirs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.errors import ArtifactError
from grpo.modalities.shared.exhibits import Film, Picture
from grpo.modalities.shared.images import without_images
from grpo.report.reading import Run
from grpo.runtime.artifacts.stored_iterations import IterationFiles
from grpo.runtime.artifacts.tables import (
    FIRST_ANSWER,
    FIRST_SCORE,
    PROMPTS,
    is_judged,
    read_table,
)
from grpo.runtime.chats import show_prompt

SOLVED = 1.0  # the outcome of a rollout that the judge accepts
CHOICES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "solved": lambda rows: rows["outcome"] == SOLVED,
    "not solved": lambda rows: (rows["status"] == "scored") & (rows["outcome"] < SOLVED),
    "unparsable": lambda rows: rows["status"] == "unparsable",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout to show; `kind` is a key of CHOICES."""

    kind: str
    iteration: str  # "iteration 3 of 3"; empty if the round has one
    rollout_id: str
    prompt: str
    first_answer: str | None  # of its group; None if there is none
    is_revision: bool  # whether the group was sampled from its first answer
    text: str
    picture: Picture | None  # generated image; None if rollouts are not images
    film: Film | None  # replay of a simulated rollout; None if there is none, or it failed
    is_finished: bool
    outcome: float
    reward: float
    advantage: float
    group_rate: float  # mean outcome of its group
    group_size: int


def read_samples(artifacts: Path, run: Run) -> dict[str, list[Sample]]:
    """Returns the samples of each round: per kind, the rollout with the largest |advantage|.

    They are of the round's first and of its last iteration.

    Raises:
      ArtifactError: If the training prompts are missing or differ from those of the rollouts, or
        images or actions of the rollouts are missing or broken.
    """
    path = artifacts / "prompts" / "train.parquet"
    prompts = read_table(path, PROMPTS).set_index("prompt_id")["prompt"]
    samples = {}
    for name, rollouts in run.rollouts.items():
        unknown = set(rollouts["prompt_id"]) - set(prompts.index)
        if unknown:
            raise ArtifactError(
                f"{path}: must hold prompt_id={min(unknown)!r} of the round {name}; "
                "rerun the stage prepare and the stages after it"
            )
        files = run.iterations[name]
        samples[name] = [
            sample
            for number in dict.fromkeys((0, len(files) - 1))
            for sample in _of_iteration(
                artifacts, run, files[number], rollouts[rollouts["iteration"] == number], prompts
            )
        ]
    return samples


def _of_iteration(
    artifacts: Path, run: Run, files: IterationFiles, rollouts: pd.DataFrame, prompts: pd.Series
) -> list[Sample]:
    """Returns the samples of one iteration.

    Args:
      rollouts: All rollouts of the iteration.
      prompts: Texts by prompt_id.
    """
    rollouts = rollouts.reset_index(drop=True)
    chosen = _choose(rollouts.join(prompts, on="prompt_id"))
    training = run.params.arms[run.params.rounds[files.round].arm].training
    stored = training.stored_rollouts if files.index else "all"
    shown: Sequence[Picture | Film | None] = [None] * len(chosen)
    if stored != "tables":
        shown = run.params.modality.show_rollouts(
            artifacts, run.params, files, rollouts, chosen, has_media=stored == "all"
        )
    label = str(files) if files.total > 1 else ""
    return [
        _sample(row, exhibit, label)
        for row, exhibit in zip(chosen.to_dict("records"), shown, strict=True)
    ]


def _choose(rollouts: pd.DataFrame) -> pd.DataFrame:
    """Returns at most one rollout of each kind, with its row number in the iteration's table."""
    groups = rollouts["outcome"].where(is_judged(rollouts)).groupby(rollouts["prompt_id"])
    ordered = rollouts.assign(
        row=range(len(rollouts)),
        rate=groups.transform("mean"),
        size=groups.transform("count"),
        gain=rollouts["advantage"].abs(),
    ).sort_values(["gain", "rollout_id"], ascending=[False, True])
    first = [ordered[matches(ordered)].head(1).assign(kind=k) for k, matches in CHOICES.items()]
    return pd.concat(first)


def _sample(row: Mapping[Hashable, Any], exhibit: Picture | Film | None, iteration: str) -> Sample:
    return Sample(
        kind=row["kind"],
        iteration=iteration,
        rollout_id=row["rollout_id"],
        prompt=visible(show_prompt(row["prompt"])),
        first_answer=None if pd.isna(first := row.get(FIRST_ANSWER)) else visible(first),
        is_revision=bool(pd.notna(row.get(FIRST_SCORE))),
        text=visible(row["text"]),
        picture=exhibit if isinstance(exhibit, Picture) else None,
        film=exhibit if isinstance(exhibit, Film) else None,
        is_finished=bool(row["is_finished"]),
        outcome=float(row["outcome"]),
        reward=float(row["reward"]),
        advantage=float(row["advantage"]),
        group_rate=float(row["rate"]),
        group_size=int(row["size"]),
    )


def visible(text: str) -> str:
    """Returns the text without encoded images, control characters escaped except line breaks."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in without_images(text)
    )
