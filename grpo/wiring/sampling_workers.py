"""Setup of a sampling worker."""

import time
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from grpo.modalities.modality import Judgement
from grpo.modalities.policy import Policy
from grpo.params.parameters import Purpose
from grpo.runtime.artifacts.tables import PROMPTS, read_table
from grpo.runtime.executors.base import Seconds, Work
from grpo.runtime.machine import prepare_machine
from grpo.sampling.drawing import sampling_skill
from grpo.sampling.scoring import Judges, RewardRule, judging_skill, score_captions
from grpo.schema import DATA
from grpo.wiring.executors import receive
from grpo.wiring.judging_workers import JudgingSetup
from grpo.wiring.policies import (
    draws_of_evaluation,
    draws_of_profile,
    load_sampler,
    modes_of_round,
)
from grpo.wiring.rewards import build_judges
from grpo.wiring.shaping import build_shaping

PURPOSES: dict[str, Purpose] = {
    "profile": "outcome",
    "round": "reward",
    "evaluation": "evaluation",
}


class SamplingSetup(JudgingSetup):
    """The setup of a worker that samples."""

    purpose: Literal["profile", "round", "evaluation"]
    round: str | None = None  # name of the round, if rollouts are for one
    base: Path
    policy: Path
    judges: bool = True  # whether the worker also judges rollouts


def make_sampling_work(line: str) -> Work:
    """Returns the skills of a sampling worker.

    Raises:
      ArtifactError: If the prompts are invalid, or the code differs from the stage's.
      MissingExtraError: If a package is not installed.
      ParameterError: If the device is missing, or the judge's model cannot be loaded.
    """
    setup = receive(SamplingSetup, line)
    prepare_machine(setup.params.machine)
    return sampling_work(setup)


def sampling_work(
    setup: SamplingSetup,
    trained: Policy[Any] | None = None,
    judges: Judges | None = None,
) -> Work:
    """Returns the skills of a sampling worker.

    Args:
      trained: The policy that is trained in this process, whose weights the sampler may share.
      judges: The judges, if they are loaded already.
    """
    tasks = read_table(setup.prompts, PROMPTS)
    sampler = _Sampler(setup, tasks, trained)
    skills = {"draw": sampling_skill(lambda: sampler.policy, sampler.draws, sampler.source)}
    if setup.judges:
        judges = judges or build_judges(setup.params, DATA, PURPOSES[setup.purpose])
        skills["judge"] = judging_skill(judges, tasks)
    return Work(skills, sampler.seconds, sampler.load_weights, sampler.sleep)


class _Sampler:
    """A policy that is loaded on first use."""

    def __init__(
        self, setup: SamplingSetup, tasks: pd.DataFrame, trained: Policy[Any] | None
    ) -> None:
        self._setup, self._tasks, self._trained = setup, tasks, trained
        self._seconds: Seconds = {}
        self._is_trained = trained is not None
        self.draws = _draws_of(setup)

    @cached_property
    def policy(self) -> Policy[Any]:
        start, setup = time.perf_counter(), self._setup
        judge = _judge_of_intermediate_samples(setup, self._tasks)
        if self._trained is not None:
            shared = setup.params.modality.share_sampler(setup.params, self._trained, judge)
            if shared is not None:
                return shared
        policy = load_sampler(
            setup.params,
            base=setup.base,
            directory=setup.policy,
            draws=next(iter(self.draws.values())),
            judge=judge,
            policies_per_host=setup.policies_per_host,
        )
        self._seconds["load"] = time.perf_counter() - start
        return policy

    def load_weights(self, path: Path) -> None:
        """Loads trained weights, unless the policy shares them."""
        self._is_trained = True
        if self.policy is not self._trained:
            self.policy.load_weights(path)

    def sleep(self) -> None:
        """Frees the device memory of a policy of its own, if one is loaded."""
        if "policy" in vars(self) and self.policy is not self._trained:
            self.policy.sleep()

    def source(self) -> object:
        """Returns where the weights come from: the policy's directory, or the stage train."""
        return f"train@{self._setup.round}" if self._is_trained else self._setup.policy

    def seconds(self) -> Seconds:
        """Returns the seconds of loading and of a simulator."""
        if self._seconds and self.policy.simulation_seconds:
            self._seconds["simulation"] = self.policy.simulation_seconds
        return self._seconds


def _draws_of(setup: SamplingSetup) -> dict[str, Any]:
    """Returns the sampling settings by name of the sampling mode."""
    if setup.purpose == "evaluation":
        return draws_of_evaluation(setup.params)
    if setup.round is None:
        return {"sampled": draws_of_profile(setup.params)}
    return modes_of_round(setup.params, setup.round)


def _judge_of_intermediate_samples(setup: SamplingSetup, tasks: pd.DataFrame) -> Judgement | None:
    """Returns a judge of a round's intermediate samples; None if sampling needs none."""
    params = setup.params
    if setup.round is None:
        return None
    sampling = params.find_arm(params.find_round(setup.round).arm).sampling
    if not params.modality.judges_while_sampling(sampling):
        return None
    rule = RewardRule(
        judges=build_judges(params, DATA, "outcome"),
        shaping=build_shaping(params).without_shaping(),
    )
    return lambda captions, media: score_captions(captions, media.numpy(), tasks=tasks, rule=rule)
