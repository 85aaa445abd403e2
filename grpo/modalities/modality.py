"""What the core knows of a kind of step: its parameters, how it draws, how policies are made.

This file and the modalities' own import no torch: `grpo check` and flows read them. Methods import
what they need, so that a run does not wait for the packages of other modalities.
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
    TypeVar,
    runtime_checkable,
)

from pydantic import Field

from grpo.schema import Machine, NonNegative, Positive, Rate, Strict

if TYPE_CHECKING:
    import pandas as pd
    from torch import Generator, Tensor

    from grpo.modalities.base import Policy
    from grpo.modalities.costs import CostModel
    from grpo.modalities.shared.exhibits import Film, Phase, Picture
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.types import Rollouts

# Scores intermediate samples: captions and media, row by row -> scores in [0, 1].
Judgement = Callable[[list[str], Any], list[float]]
DrawsT = TypeVar("DrawsT", bound=Strict)  # of profile and evaluation


class Lora(Strict):
    """Low-rank adapters, trained instead of the base's weights."""

    rank: Annotated[int, Field(gt=0, le=65536)]  # no model is wider
    alpha: Positive
    dropout: NonNegative
    target_modules: list[str] = Field(min_length=1)


class ScratchBackbone(Strict):
    """A fresh model of a `transformers` class without a head, told words."""

    source: Literal["scratch"]
    architecture: str  # e.g. LlamaModel
    config: dict[str, int | float | str | bool]


class SamplingParams(Strict):
    """How an arm draws rollouts; each modality has its own."""

    rollouts_per_batch: Positive  # what is sampled, and saved for a resume, at once


class TokenSampling(SamplingParams):
    """How rollouts are drawn; log-probs use the same temperature."""

    temperature: Rate
    top_p: Annotated[float, Field(gt=0, le=1)]


class TokenDraws(Strict):
    """How evaluation and profile draw."""

    temperature: Rate


class PolicyParams(Strict):
    """The section `policy`; each modality has its own."""

    kind: str
    base: Strict
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time

    @property
    def warmup(self) -> Any:
        """The warm-up of a fresh base; None if the base is imported."""
        return getattr(self.base, "warmup", None)

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the configurations of models that are made here, by their parameter path."""
        return {}


def find_other_temperature(sampling: TokenSampling, profiled: TokenDraws) -> str | None:
    """Returns how the temperatures of an arm and of the profile differ; None if they do not."""
    if sampling.temperature == profiled.temperature:
        return None
    return (
        "sampling.temperature must equal evaluation.sampling.temperature, at which the profile "
        f"samples, for reuse_profile_rollouts, got {sampling.temperature} and "
        f"{profiled.temperature}"
    )


PolicyT = TypeVar("PolicyT", bound=PolicyParams)
PolicyT_co = TypeVar("PolicyT_co", bound=PolicyParams, covariant=True)
SamplingT = TypeVar("SamplingT", bound=SamplingParams)  # of an arm


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
    """A kind of step and all that belongs to it; `draws` below are its policies' `decoding`."""

    kind: ClassVar[str]  # policy.kind
    policy: type[PolicyT]  # the type of the section `policy`
    sampling: type[SamplingT]  # of arms.ARM.sampling
    evaluation_sampling: type[DrawsT]  # of evaluation.sampling
    asked: ClassVar[Literal["text", "caption", "scene"]]  # what a prompt is read as
    judged: ClassVar[Literal["text", "media", "simulation"]]  # what a judge reads
    step_name: ClassVar[str]  # as the report calls it
    has_greedy: ClassVar[bool] = True  # evaluation draws greedily too

    def find_wrong(self, params: RunParams[PolicyT], judge: str) -> Iterator[str]:
        """Yields what is wrong in parameters that are valid one by one, each with its path."""
        if params.machine.compile:
            yield f"with policy.kind {self.kind}, machine.compile must be false"

    def find_indivisible(self, params: RunParams[PolicyT]) -> Iterator[str]:
        """Yields what must be otherwise for ranks to train together."""
        yield "policy.kind must be tokens"

    def phases(self, policy: PolicyT) -> tuple["Phase", ...]:
        """Returns the phases that steps are labeled with; none if they have no phases."""
        return ()

    def measure_phases(
        self,
        policy: "Policy[Any]",
        trajectory: Any,
        rollouts: "Rollouts",
        names: Sequence[str],
        generator: "Generator",
    ) -> dict[str, object]:
        """Returns what the profile says of its phases; asked only if there are some."""
        return {}

    def describe_phases(
        self,
        rollouts: "Rollouts",
        trained: "Tensor",
        state: dict[str, dict[str, float]],
        names: Sequence[str],
    ) -> list[Any]:
        """Returns a dataclass per phase, a row of a round's phases.csv; asked as above.

        Args:
          trained: Whether a step of a rollout had weight in the round's updates.
          state: Of the objective, after the round.
        """
        return []

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[PolicyT],
        name: str,
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
    ) -> Sequence["Picture | Film | None"]:
        """Returns what the report shows of some rollouts of a round beside their text.

        Args:
          name: Of the round.
          rollouts: All of the round.
          chosen: With the columns row (in `rollouts`), rollout_id and prompt.

        Raises:
          ArtifactError: If a file is missing or broken.
        """
        return [None] * len(chosen)

    def takes_messages(self, policy: PolicyT) -> bool:
        """Returns whether a prompt may be a list of chat messages."""
        return False

    @abstractmethod
    def rule_facts(self, policy: PolicyT, sampling: SamplingT) -> dict[str, Any]:
        """Returns what the composition rules may know of an arm: fields of a Plan."""

    @abstractmethod
    def make_base(self, params: RunParams[PolicyT], data: Path) -> "BasePolicy":
        """Returns the base policy that the parameters describe.

        Args:
          data: Where parameters name files in.

        Raises:
          ParameterError: If the source does not exist or a class refuses its configuration.
        """

    @abstractmethod
    def round_draws(self, policy: PolicyT, sampling: SamplingT, *, rounds_behind: int) -> Any:
        """Returns how an arm draws the rollouts of a round, and scores them.

        Args:
          rounds_behind: Rounds of the same arm that the round goes on from.
        """

    def reference_draws(self, draws: Any) -> Any:
        """Returns how the base policy scores rollouts that were drawn by `round_draws`."""
        return draws

    @abstractmethod
    def evaluation_draws(self, policy: PolicyT, sampling: DrawsT) -> dict[str, Any]:
        """Returns how evaluation draws: "sampled", and "greedy" where there is such a thing."""

    def profile_draws(self, policy: PolicyT, sampling: DrawsT) -> Any:
        """Returns how the profile draws: as evaluation does, several rollouts per prompt."""
        return self.evaluation_draws(policy, sampling)["sampled"]

    def find_unlike_profile(self, sampling: SamplingT, profiled: DrawsT) -> str | None:
        """Returns how an arm's sampling differs from the profile's; None if it does not.

        The text is an error message that starts with a parameter of the arm.
        """
        return "selection must not hold reuse_profile_rollouts: the profile draws otherwise"

    def judges_while_sampling(self, sampling: SamplingT) -> bool:
        """Returns whether drawing rollouts reads the judge."""
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
        """Returns the policy of a directory, on the machine's device, without dropout.

        Args:
          base: The base policy's directory; `directory`, if it is another, holds what changed.
          policies_per_host: Policies that share this host's processors.

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
        """Returns the policy of a directory to draw rollouts from.

        Args:
          judge: If `judges_while_sampling`.

        Raises:
          ArtifactError: If a file is missing or broken.
          MissingExtraError: If a package is not installed.
        """
        return self.load_policy(
            params, base=base, directory=directory, draws=draws, policies_per_host=policies_per_host
        )

    def load_cost_model(self, params: RunParams[PolicyT], *, base: Path) -> "CostModel | None":
        """Returns what predicts the FLOPs of runs from a base policy; None: this modality cannot.

        Args:
          base: The base policy's directory.

        Raises:
          ArtifactError: If a file is missing or broken.
        """
        return None

    @abstractmethod
    def layout(self, policy: PolicyT, base: Path) -> "Layout":
        """Returns what is stored of rollouts, without loading the policy that draws them.

        Raises:
          ArtifactError: If the base policy is none of a known class.
        """
