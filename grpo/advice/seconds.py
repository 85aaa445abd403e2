"""Predicts seconds of rounds at the rates that the stages before them were measured at.

docs/advice.md gives the model. Seconds are those of `.runs/` in this workspace.
"""

import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from grpo.advice.facts import Facts
from grpo.advice.prediction import Amounts, Compared, decode_steps
from grpo.errors import GrpoError
from grpo.params.manifests import require_described
from grpo.params.parameters import BASE, Parameters
from grpo.report.reading import read_cost
from grpo.report.seconds import stages_of_round, sum_by_part
from grpo.runtime.artifacts.tables import PROMPTS, read_table
from grpo.runtime.artifacts.usage import USAGE, Usage, read_usage
from grpo.runtime.executors.base import Executor
from grpo.runtime.machine import prepare_machine
from grpo.sampling.drawing import sample_rollouts, stored_batches
from grpo.sampling.scoring import judge_stored
from grpo.sampling.shaping import Shaping
from grpo.schema import DATA
from grpo.wiring.executors import open_executor
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.shaping import build_shaping

STAGES_OF_ROUND = len(stages_of_round(""))
PROFILE: Final = "profile"
WARM_UP = "warm-up"  # the part of the stage base that trains
SMALL, LARGE = 2, 32  # prompts of the two timed batches
LARGE_FRACTION = 0.05  # of the profile's prompts: the most that the large batch takes
ROLLOUTS_PER_PROMPT = 8  # of the timed batches
REPEATS = 5  # of each timed batch, at most; the fastest counts
REPEAT_SECONDS = 10.0  # after which no further repeat starts


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one or several rounds, predicted or measured."""

    sampling: float
    updates: float
    judging: float
    rest: float  # start-up of the stages, reading, writing

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return self.sampling + self.updates + self.judging + self.rest

    @classmethod
    def of(cls, parts: Sequence["Seconds"]) -> "Seconds":
        """Returns the sum of several."""
        names = cls.__dataclass_fields__
        return cls(**{name: sum(getattr(each, name) for each in parts) for name in names})

    @classmethod
    def of_stages(cls, usages: Iterable[Usage]) -> "Seconds":
        """Returns the measured seconds of several stages."""
        seconds = sum_by_part(usages)
        sampling, updates, judging = (
            seconds.pop(each) for each in ("sampling", "update", "judging")
        )
        rest = sum(seconds.values())
        return cls(sampling=sampling, updates=updates, judging=judging, rest=rest)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds per amount, and those of the profile."""

    per_decode_step: float
    per_sampling_flop: float
    per_update_flop: float
    per_judging: float  # a call that judges the rollouts of an iteration
    per_judged_rollout: float
    per_stage: float  # what a stage takes beside sampling and judging
    profile: float

    def predict(self, amounts: Amounts, *, rounds: int) -> Seconds:
        """Returns the seconds of rounds with these amounts in all."""
        return Seconds(
            sampling=self.per_decode_step * amounts.decode_steps
            + self.per_sampling_flop * amounts.sampling_flops,
            updates=self.per_update_flop * amounts.update_flops,
            judging=self.per_judging * amounts.iterations
            + self.per_judged_rollout * amounts.rollouts,
            rest=self.per_stage * STAGES_OF_ROUND * rounds,
        )


class Work(NamedTuple):
    """Work whose seconds are measured, as a number of fixed and of proportional units."""

    seconds: float
    fixed: float  # e.g. decode steps, whatever the number of rollouts
    proportional: float  # e.g. FLOPs


class Calibration(NamedTuple):
    """A small and a large batch of the base policy, timed by advice."""

    sampling: tuple[Work, Work]  # decode steps and FLOPs
    judging: tuple[Work, Work]  # calls and rollouts


def read_rates(artifacts: Path, params: Parameters, facts: Facts) -> Rates | str:
    """Returns the rates measured in this workspace, or a sentence that says why there are none.

    Samples and judges a few small batches of the base policy; see `calibrate`.

    Raises:
      ArtifactError: If the summary of the warm-up is missing or broken.
    """
    base, profile = read_usage(BASE), read_usage(PROFILE)
    if base is None or profile is None:
        missing = [name for name, usage in ((BASE, base), (PROFILE, profile)) if usage is None]
        return f"this workspace has not measured {' and '.join(missing)} ({USAGE}/STAGE.json)."
    if WARM_UP not in base.seconds_by_part:
        return "the base has no warm-up, from which the seconds of updates would be known."
    if "sampling" not in profile.seconds_by_part:
        return f"{USAGE / 'profile.json'} must have seconds of sampling: rerun the stage profile."
    try:
        calibration = calibrate(artifacts, params)
    except GrpoError as error:
        return f"the base policy cannot be sampled and judged here: {error}"
    warm_up = read_cost(artifacts / "training" / BASE / "summary.json")
    return measure_rates(base, profile, calibration, facts, warm_up_flops=warm_up["flops"])


def measure_rates(
    base: Usage, profile: Usage, calibration: Calibration, facts: Facts, *, warm_up_flops: float
) -> Rates:
    """Returns rates at which the warm-up and the profile take the seconds that they took."""
    took, drawn = Seconds.of_stages([profile]), facts.drawn
    per_batch = facts.rollouts_per_batch
    steps = decode_steps(
        facts, np.arange(len(drawn)), drawn.astype(float), draws=1, rollouts_per_batch=per_batch
    )
    rollouts = float(drawn.sum())
    sampling = Work(took.sampling, steps, facts.cost.flops)
    judging = Work(took.judging, math.ceil(rollouts / per_batch), rollouts)
    per_decode_step, per_sampling_flop = split_seconds(sampling, *calibration.sampling)
    per_judging, per_judged_rollout = split_seconds(judging, *calibration.judging)
    return Rates(
        per_decode_step=per_decode_step,
        per_sampling_flop=per_sampling_flop,
        per_update_flop=base.seconds_by_part[WARM_UP] / warm_up_flops,
        per_judging=per_judging,
        per_judged_rollout=per_judged_rollout,
        per_stage=took.rest,
        profile=took.total,
    )


def split_seconds(whole: Work, small: Work, large: Work) -> tuple[float, float]:
    """Returns seconds per fixed and per proportional unit, at which `whole` took what it took.

    The batches give only their ratio, because the machine may be more or less busy now. A negative
    rate, which noise can cause, counts as 0. Batches that differ only in size give no fixed rate.
    """
    if small.fixed * large.proportional <= large.fixed * small.proportional:
        return 0.0, whole.seconds / whole.proportional
    per_fixed = max(small.seconds * large.proportional - large.seconds * small.proportional, 0.0)
    per_unit = max(small.fixed * large.seconds - large.fixed * small.seconds, 0.0)
    scale = whole.seconds / (per_fixed * whole.fixed + per_unit * whole.proportional)
    return scale * per_fixed, scale * per_unit


def calibrate(artifacts: Path, params: Parameters) -> Calibration:
    """Samples and judges small and large batches of the base policy and returns their seconds.

    The same work as that of the stage profile, in a temporary directory.

    Raises:
      ArtifactError: If the base policy, the prompts or the judge's files are missing or broken.
      MissingExtraError, ParameterError, WorkerError: If this machine cannot run sampler or judge.
    """
    prepare_machine(params.machine)
    require_described(artifacts / "data" / "judge.json", params, DATA, "judge")
    base, tasks = artifacts / "policies" / BASE, artifacts / "prompts" / "train.parquet"
    setup = SamplingSetup(params=params, prompts=tasks, purpose=PROFILE, base=base, policy=base)
    prompts, shaping = read_table(tasks, PROMPTS), build_shaping(params)
    large = max(2 * SMALL, min(LARGE, int(LARGE_FRACTION * len(prompts))))
    batches = [prompts.iloc[:: max(1, len(prompts) // n)].head(n) for n in (SMALL, large)]
    repeats: list[list[tuple[Work, Work]]] = []
    with open_executor(make_sampling_work, setup) as executor:
        start = time.perf_counter()
        while len(repeats) < 2 or (
            len(repeats) < 1 + REPEATS and time.perf_counter() - start < REPEAT_SECONDS
        ):
            # In turn, so that both batches see the same load.
            repeats.append([time_batch(executor, batch, shaping) for batch in batches])
    repeats.pop(0)  # the first batches are slower
    (small_sampling, small_judging), (large_sampling, large_judging) = (
        [min(work) for work in zip(*times, strict=True)] for times in zip(*repeats, strict=True)
    )
    return Calibration(
        sampling=(small_sampling, large_sampling), judging=(small_judging, large_judging)
    )


def time_batch(executor: Executor, prompts: pd.DataFrame, shaping: Shaping) -> tuple[Work, Work]:
    """Samples and judges a batch, always the same one, and returns what both took."""
    asked = prompts.reset_index(drop=True).assign(rollouts=ROLLOUTS_PER_PROMPT)
    count = ROLLOUTS_PER_PROMPT * len(asked)
    with tempfile.TemporaryDirectory() as folder:
        scratch, start = Path(folder), time.perf_counter()
        batch = sample_rollouts(executor, asked, rollouts_per_batch=count, seed=0, scratch=scratch)
        sampled = time.perf_counter()
        judge_stored(executor, stored_batches(scratch), shaping, scratch=scratch / "judged")
        judged = time.perf_counter()
    longest = float(batch.table["steps"].max())
    return (
        Work(sampled - start, longest, float(batch.cost.flops)),
        Work(judged - sampled, 1.0, float(count)),
    )


@dataclass(frozen=True, kw_only=True)
class ComparedSeconds:
    """Predicted and measured seconds of a finished round."""

    round: str
    predicted: Seconds
    at_counted: Seconds  # predicted for the amounts that were counted
    measured: Seconds


def compare_seconds(compared: Sequence[Compared], rates: Rates) -> list[ComparedSeconds]:
    """Returns the comparisons of those rounds whose stages were all measured here."""
    found = []
    for each in compared:
        usages = [read_usage(stage) for stage in stages_of_round(each.round)]
        measured = [usage for usage in usages if usage is not None]
        if len(measured) == len(usages):
            found.append(
                ComparedSeconds(
                    round=each.round,
                    predicted=rates.predict(each.predicted, rounds=1),
                    at_counted=rates.predict(each.actual, rounds=1),
                    measured=Seconds.of_stages(measured),
                )
            )
    return found
