"""The interface of modalities: parameters, sampling settings and constructors of policies.

This file and each `modality.py` do not import torch, because `grpo check` and flows read them.
Methods import their packages, so that a run does not wait for those of other modalities.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

from pydantic import Field

from grpo.modalities.shared.temperature import (
    RisingTemperature,
    Statistics,
    Temperature,
    raises_of,
)
from grpo.schema import Fraction, Machine, NonNegative, Positive, Rate, Strict

if TYPE_CHECKING:
    import pandas as pd
    from torch import Generator, Tensor

    from grpo.modalities.costs import CostModel
    from grpo.modalities.policy import Policy
    from grpo.modalities.shared.exhibits import Film, Phase, Picture
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.runtime.artifacts.stored_iterations import IterationFiles
    from grpo.runtime.dry_run import DryRun
    from grpo.types import Rollouts

# Judges intermediate samples: captions and media, one row each -> scores in [0, 1].
Judgement = Callable[[list[str], Any], list[float]]
DrawsT = TypeVar("DrawsT", bound=Strict)  # sampling parameters of profile and evaluation


class Lora(Strict):
    """Low-rank adapters; the base's weights stay frozen."""

    rank: Annotated[int, Field(gt=0, le=65536)]  # no model is wider
    alpha: Positive
    dropout: NonNegative
    target_modules: list[str] = Field(min_length=1)


class PairWarmup(Strict):
    """Supervised training on pairs of prompt and solution, up to partial skill."""

    prompts: Positive
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate


class TextWarmup(PairWarmup):
    """The same, with a mix of solutions that the task generates."""

    answer_mark: Annotated[str, Field(min_length=1)]  # text before the answer
    # Solutions that show their work, of all or by family; the others are answers only.
    worked_fraction: Fraction | dict[str, Fraction]
    wrong_fraction: Fraction  # of the answers-only solutions: the answer of another prompt


class SamplingParams(Strict):
    """Sampling parameters of an arm; each modality has its own.

    Parameters may depend on the rewards of earlier iterations. They then have several levels, and
    `learn` counts the level in the statistics that a policy directory stores.
    """

    rollouts_per_batch: Positive  # rollouts that are sampled, and saved for a resume, together

    @property
    def num_levels(self) -> int:
        """The number of levels; 1: parameters depend on no reward."""
        return 1

    def level(self, statistics: Statistics) -> int:
        """Returns the level that `learn` has counted."""
        return 0

    @property
    def has_other_density(self) -> bool:
        """Whether updates score rollouts under another density than that of sampling."""
        return False

    def sampled(self, level: int) -> Self:
        """Returns the parameters with which rollouts are sampled at a level."""
        return self

    def scored(self, level: int) -> Self:
        """Returns the parameters with which updates score these rollouts."""
        return self.sampled(level)

    def learn(self, statistics: Statistics, mean_reward: float) -> Statistics:
        """Returns the statistics after an iteration with a mean reward."""
        return statistics

    def describe(self, level: int) -> dict[str, float]:
        """Returns what depends on the level, for the record of an iteration."""
        return {}


class TokenSampling(SamplingParams):
    """Sampling parameters of an arm; log-probs use the same temperature, but for `scored_at`."""

    temperature: Temperature
    top_p: Annotated[float, Field(gt=0, le=1)]

    @property
    def first_temperature(self) -> float:
        """The temperature; of one that rises, the first."""
        now = self.temperature
        return now.first if isinstance(now, RisingTemperature) else now

    @property
    def num_levels(self) -> int:
        rising = self.temperature
        return rising.most_raises + 1 if isinstance(rising, RisingTemperature) else 1

    @property
    def has_other_density(self) -> bool:
        rising = self.temperature
        if not isinstance(rising, RisingTemperature) or rising.scored_at is None:
            return False
        return not rising.first == rising.last == rising.scored_at

    def sampled(self, level: int) -> Self:
        return self._at(self.describe(level).get("temperature"))

    def scored(self, level: int) -> Self:
        return self._at(self.describe(level).get("scored_at"))

    def level(self, statistics: Statistics) -> int:
        return min(raises_of(statistics), self.num_levels - 1)

    def learn(self, statistics: Statistics, mean_reward: float) -> Statistics:
        rising = self.temperature
        if not isinstance(rising, RisingTemperature):
            return statistics
        return rising.learn(statistics, mean_reward)

    def describe(self, level: int) -> dict[str, float]:
        rising = self.temperature
        if not isinstance(rising, RisingTemperature):
            return {}
        now = rising.after(level)
        return {"temperature": now, "scored_at": rising.scored_at or now}

    def _at(self, temperature: float | None) -> Self:
        """Returns the parameters with a constant temperature; None: they have one."""
        return self if temperature is None else self.model_copy(update={"temperature": temperature})


class TokenDraws(Strict):
    """Sampling parameters of evaluation and profile."""

    temperature: Rate


class PolicyParams(Strict):
    """The section `policy`; each modality has its own."""

    kind: str
    base: Strict
    lora: Lora | None
    recompute: bool  # gradient checkpointing of the blocks: less memory, more time

    @property
    def warmup(self) -> Any:
        """Warm-up parameters of a fresh base; None for an imported base."""
        return getattr(self.base, "warmup", None)

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the configurations of fresh models by parameter path."""
        return {}


def find_temperature_mismatch(sampling: TokenSampling, profiled: TokenDraws) -> str | None:
    """Returns how the temperatures of an arm and the profile differ; None if they are equal."""
    if sampling.first_temperature == profiled.temperature:
        return None
    return (
        "sampling.temperature must equal evaluation.sampling.temperature, at which the profile "
        f"samples, for reuse_profile_rollouts, got {sampling.first_temperature} and "
        f"{profiled.temperature}"
    )


PolicyT = TypeVar("PolicyT", bound=PolicyParams)
PolicyT_co = TypeVar("PolicyT_co", bound=PolicyParams, covariant=True)
SamplingT = TypeVar("SamplingT", bound=SamplingParams)  # sampling parameters of an arm


@runtime_checkable
class RunParams(Protocol[PolicyT_co]):
    """The sections of the parameters that a modality reads."""

    @property
    def seed(self) -> int: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def policy(self) -> PolicyT_co: ...

    @property
    def task(self) -> Any: ...


class Modality(ABC, Generic[PolicyT, SamplingT, DrawsT]):
    """A kind of step with its parameters, policies and metrics.

    `draws` in the methods below is the `decoding` of the modality's policies.
    """

    kind: ClassVar[str]  # policy.kind
    policy: type[PolicyT]  # the type of the section `policy`
    sampling: type[SamplingT]  # of arms.ARM.sampling
    evaluation_sampling: type[DrawsT]  # of evaluation.sampling
    prompt_kind: ClassVar[Literal["text", "caption", "scene", "image"]]
    output_kind: ClassVar[Literal["text", "media", "simulation"]]  # of what is judged
    step_name: ClassVar[str]  # name of a step in the report
    has_greedy: ClassVar[bool] = True  # evaluation also samples greedily
    has_library_format: ClassVar[bool] = False  # a base is a directory of transformers or diffusers

    def find_conflicts(self, params: RunParams[PolicyT], judge: str) -> Iterator[str]:
        """Yields errors in combinations of valid parameters, each with the parameter path."""
        if params.machine.compile:
            yield f"with policy.kind {self.kind}, machine.compile must be false"

    def find_rank_conflicts(self, params: RunParams[PolicyT]) -> Iterator[str]:
        """Yields the parameters that prevent training on several ranks."""
        yield "policy.kind must be tokens"

    def phases(self, policy: PolicyT) -> tuple["Phase", ...]:
        """Returns the phases of steps; empty for steps without phases."""
        return ()

    def measure_phases(
        self,
        policy: "Policy[Any]",
        trajectory: Any,
        rollouts: "Rollouts",
        names: Sequence[str],
        generator: "Generator",
    ) -> dict[str, object]:
        """Returns the profile's metrics per phase; called only if there are phases."""
        return {}

    def describe_phases(
        self,
        rollouts: "Rollouts",
        trained: "Tensor",
        state: dict[str, dict[str, float]],
        names: Sequence[str],
    ) -> list[Any]:
        """Returns a dataclass per phase, a row of phases.csv; called only if there are phases.

        Args:
          trained: Whether each step had weight in the round's updates.
          state: The objective's state after the round.
        """
        return []

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[PolicyT],
        files: "IterationFiles",
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
        *,
        has_media: bool,
    ) -> Sequence["Picture | Film | None"]:
        """Returns a picture or film per rollout for the report; None for rollouts of text.

        Called only if the iteration's tensors are stored.

        Args:
          files: Those of the iteration that sampled the rollouts.
          rollouts: All rollouts of the iteration.
          has_media: Whether the tensors hold the media, if rollouts are media.
          chosen: Has the columns row (index in `rollouts`), rollout_id and prompt.

        Raises:
          ArtifactError: If a file is missing or broken.
        """
        return [None] * len(chosen)

    def illustrate(self, prompt: str, answer: str, text: str) -> bytes | None:
        """Returns a picture of a rollout of text as PNG for the report; None: there is none.

        Args:
          answer: The gold answer of the prompt.
          text: Of the rollout.
        """
        return None

    def takes_messages(self, policy: PolicyT) -> bool:
        """Returns whether a prompt may be a list of chat messages."""
        return False

    @abstractmethod
    def rule_facts(self, policy: PolicyT, sampling: SamplingT) -> dict[str, Any]:
        """Returns an arm's facts for the composition rules: fields of a Plan."""

    @abstractmethod
    def step_limit(self, policy: PolicyT, sampling: SamplingT) -> int:
        """Returns the largest number of steps of a rollout."""

    @abstractmethod
    def make_base(self, params: RunParams[PolicyT], data: Path) -> "BasePolicy":
        """Returns the base policy that the parameters describe.

        Args:
          data: The directory of files that parameters name.

        Raises:
          ParameterError: If the source does not exist or a class refuses its configuration.
        """

    @abstractmethod
    def round_draws(self, policy: PolicyT, sampling: SamplingT, *, iterations_behind: int) -> Any:
        """Returns the decoding with which an arm samples and scores the rollouts of an iteration.

        Args:
          iterations_behind: Number of earlier iterations of the same arm.
        """

    def reference_draws(self, draws: Any) -> Any:
        """Returns the decoding with which the reference scores rollouts of `round_draws`."""
        return draws

    @abstractmethod
    def evaluation_draws(self, policy: PolicyT, sampling: DrawsT) -> dict[str, Any]:
        """Returns the decodings of evaluation: "sampled", and "greedy" where `has_greedy`.

        Any other, such as "beam", has one rollout per prompt.
        """

    def profile_draws(self, policy: PolicyT, sampling: DrawsT) -> Any:
        """Returns the decoding of the profile: the "sampled" one of evaluation."""
        return self.evaluation_draws(policy, sampling)["sampled"]

    def find_profile_mismatch(self, sampling: SamplingT, profiled: DrawsT) -> str | None:
        """Returns how an arm's sampling differs from the profile's; None if equal.

        The text is an error message that starts with a parameter of the arm.
        """
        return (
            "selection must not hold reuse_profile_rollouts: the profile uses other sampling "
            "settings"
        )

    def judges_while_sampling(self, sampling: SamplingT) -> bool:
        """Returns whether sampling calls the judge."""
        return False

    @abstractmethod
    def load_policy(
        self,
        params: RunParams[PolicyT],
        *,
        base: Path,
        directory: Path,
        draws: Any,
        policies_per_host: int = 1,
    ) -> "Policy[Any]":
        """Returns the policy of a directory on the machine's device, without dropout.

        Args:
          base: The base policy's directory. A different `directory` holds the trained weights.
          policies_per_host: Number of policies that share this host's cores.

        Raises:
          ArtifactError: If a file is missing or broken.
        """

    def load_sampler(
        self,
        params: RunParams[PolicyT],
        *,
        base: Path,
        directory: Path,
        draws: Any,
        policies_per_host: int = 1,
        judge: Judgement | None = None,
    ) -> "Policy[Any]":
        """Returns the policy of a directory for sampling.

        Args:
          judge: Required if `judges_while_sampling`.

        Raises:
          ArtifactError: If a file is missing or broken.
          MissingExtraError: If a package is not installed.
        """
        return self.load_policy(
            params, base=base, directory=directory, draws=draws, policies_per_host=policies_per_host
        )

    def gpus_per_sampler(self, policy: PolicyT) -> int:
        """Returns the number of GPUs that a sampler needs, if the machine has GPUs."""
        return 1

    def share_sampler(
        self,
        params: RunParams[PolicyT],
        policy: "Policy[Any]",
        judge: Judgement | None = None,
    ) -> "Policy[Any] | None":
        """Returns a sampler with the weights of a policy that is trained in the same process.

        None: a sampler needs its own copy of the weights.

        Args:
          judge: Required if `judges_while_sampling`.
        """
        return policy

    def load_cost_model(
        self, params: RunParams[PolicyT], *, base: Path, policy: "Policy[Any] | None" = None
    ) -> "CostModel | None":
        """Returns the cost model of runs from a base policy; None: the modality has none.

        Args:
          base: The base policy's directory.
          policy: A policy of the run, if this process has one; else the base is loaded.

        Raises:
          ArtifactError: If a file is missing or broken.
        """
        return None

    def rehearsed_prompts(self, params: RunParams[PolicyT]) -> list[str]:
        """Returns prompts for a dry run; none: those of the task."""
        return []

    def load_unfilled(
        self, params: RunParams[PolicyT], *, data: Path, draws: Any, run: "DryRun"
    ) -> "Policy[Any] | None":
        """Returns the policy of the base for a dry run; None: the modality has no dry run.

        Raises:
          ParameterError: If the configuration of the base is not on this machine.
        """
        return None

    @abstractmethod
    def layout(self, policy: PolicyT, base: Path) -> "Layout":
        """Returns the layout of stored rollouts without loading the policy.

        Raises:
          ArtifactError: If the class of the base policy is unknown.
        """
