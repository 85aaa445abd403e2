"""Rollouts of every policy of an arm for the same prompts and seeds, side by side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from grpo.errors import ArtifactError
from grpo.modalities.shared.exhibits import Picture, embed
from grpo.params.parameters import BASE
from grpo.report.reading import Run
from grpo.report.samples import SOLVED, visible
from grpo.report.style import css_color_of
from grpo.runtime.artifacts.tables import EVALUATION_SAMPLES, PROMPTS, read_table
from grpo.runtime.chats import show_prompt

SAME = ["rollout_id", "prompt_id", "family", "prompt"]  # columns that are equal for all policies
FEW_POLICIES = 4  # up to so many, large images fit side by side
LARGE_PIXELS, SMALL_PIXELS = 96, 64


@dataclass(frozen=True, kw_only=True)
class ShownRollout:
    """One rollout to show."""

    text: str  # as the judge read it
    picture: Picture | None
    is_right: bool
    reward: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with its rollouts by policy."""

    family: str
    prompt: str
    cells: list[list[ShownRollout]]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Table of one arm: policies as columns, prompts as rows."""

    arm: str
    color: str
    policies: list[str]
    num_right: list[int]  # by policy, of the `num_shown` rollouts
    num_shown: int
    rows: list[Row]

    @property
    def has_images(self) -> bool:
        return self.rows[0].cells[0][0].picture is not None


def read_sheets(artifacts: Path, run: Run) -> list[Sheet]:
    """Returns a sheet per arm: a few rollouts per prompt for images, the first one for texts.

    Raises:
      ArtifactError: If samples are missing, broken, or of other prompts than those of the base.
    """
    evaluations = artifacts / "evaluations"
    gold = read_table(artifacts / "prompts" / "eval.parquet", PROMPTS)
    answers = gold.set_index("prompt_id")["answer"]
    samples: dict[str, pd.DataFrame] = {}
    for name in [BASE, *run.params.rounds]:
        path = evaluations / f"{name}.samples.parquet"
        samples[name] = read_table(path, EVALUATION_SAMPLES)
        if not samples[name][SAME].equals(samples[BASE][SAME]):
            raise ArtifactError(
                f"{path}: must hold the rollouts of {evaluations / BASE}.samples.parquet, "
                "got others; rerun the evaluation"
            )
    shown = {name: _select_shown(table, answers) for name, table in samples.items()}
    return [_sheet(run, arm, shown) for arm in run.arms]


def _select_shown(samples: pd.DataFrame, answers: pd.Series) -> pd.DataFrame:
    """Returns the rollouts to show, with the gold answer of their prompts."""
    has_images = (samples["image"] != b"").any()
    shown = samples if has_images else samples.groupby("prompt_id", sort=False).head(1)
    return shown.join(answers, on="prompt_id")


def _sheet(run: Run, arm: str, samples: Mapping[str, pd.DataFrame]) -> Sheet:
    policies = run.chain(arm)
    longest = LARGE_PIXELS if len(policies) <= FEW_POLICIES else SMALL_PIXELS
    illustrate = run.params.modality.illustrate
    rollouts = {
        name: {
            prompt: _shown_rollouts(rows, longest, illustrate)
            for prompt, rows in samples[name].groupby("prompt_id")
        }
        for name in policies
    }
    return Sheet(
        arm=arm,
        color=css_color_of(run.arms.index(arm)),
        policies=policies,
        num_right=[int((samples[name]["outcome"] == SOLVED).sum()) for name in policies],
        num_shown=len(samples[BASE]),
        rows=[
            Row(
                family=each["family"],
                prompt=visible(show_prompt(each["prompt"])),
                cells=[rollouts[name][each["prompt_id"]] for name in policies],
            )
            for each in samples[BASE].drop_duplicates("prompt_id").to_dict("records")
        ],
    )


def _shown_rollouts(
    rows: pd.DataFrame, longest_pixels: int, illustrate: Callable[[str, str, str], bytes | None]
) -> list[ShownRollout]:
    found = []
    for each in rows.to_dict("records"):
        png = each["image"] or illustrate(each["prompt"], each["answer"], each["text"])
        found.append(
            ShownRollout(
                text=visible(each["text"]),
                picture=embed(png, longest_pixels=longest_pixels) if png else None,
                is_right=each["outcome"] == SOLVED,
                reward=float(each["reward"]),
            )
        )
    return found
