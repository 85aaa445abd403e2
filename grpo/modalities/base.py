"""What sampling, training and evaluation ask of a policy, whatever its steps are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from grpo.modalities.shared.packed import Layout, prompt_rows
from grpo.runtime.ranks import sum_counts
from grpo.types import ActionChunks, Cost, Rollouts, Scores, StepNoise


@runtime_checkable
class Trajectory(Protocol):
    """What the policy did in a batch of rollouts; the policy's own type."""

    @property
    def mask(self) -> Bool[Tensor, "rollout step"]: ...

    @property
    def noise(self) -> StepNoise | None:
        """What the noise of its steps is like; None if they are no Gaussians."""
        ...

    @property
    def variant(self) -> Int[Tensor, " rollout"] | None:
        """Under which variant of its prompt a rollout was drawn, 0: as it is; None: no such."""
        ...

    @property
    def chunks(self) -> ActionChunks | None:
        """What its steps did, if they are chunks of actions; None: they are not."""
        ...

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "Trajectory":
        """Returns some rollouts, cut after `num_steps` steps: what is cut is not computed."""
        ...

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns rollouts and their log-probs as flat tensors that can be concatenated."""
        ...


TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)


class Policy(ABC, Generic[TrajectoryT]):
    """Samples trajectories and scores them under the very density it samples from."""

    cost: Cost  # grows with every call
    simulation_seconds: float = 0.0  # so far, for what it acts in: a simulator
    decoding: Any  # how it draws: part of its density

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """What is trained."""

    @abstractmethod
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns `group_sizes[i]` rollouts of prompt i, and their log-probs in nats."""

    def replayed(self, trajectory: TrajectoryT) -> TrajectoryT:
        """Returns the trajectory as updates score it: with what they repeat of its sampling."""
        return trajectory

    def log_prob(
        self, trajectory: TrajectoryT, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Float[Tensor, "rollout step"]:
        """Returns the log-probs of `score`."""
        return self.score(trajectory, needed).logp

    @abstractmethod
    def score(
        self, trajectory: TrajectoryT, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Scores:
        """Returns log-probs in nats, differentiable in the parameters, and Gaussian steps' means.

        Args:
          needed: The steps to compute; the others may be anything. None: all.
        """

    @abstractmethod
    def decode(self, trajectory: TrajectoryT) -> list[str]:
        """Returns what a judge reads of each rollout."""

    @abstractmethod
    def is_finished(self, trajectory: TrajectoryT) -> Bool[Tensor, " rollout"]:
        """Returns which rollouts ended by themselves, not at the step limit."""

    @abstractmethod
    def widths(
        self,
        trajectory: TrajectoryT,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns how many positions some rollouts occupy in a pass that scores `needed`."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """What `Trajectory.pack` stores."""

    @abstractmethod
    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns the trajectory and behavior log-probs of tensors that fit the layout.

        Args:
          row: Of each rollout's prompt.

        Raises:
          ArtifactError: If they do not fit the policy.
        """

    def unpack(
        self, tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Args:
          group: Ids in the table's order.

        Raises:
          ArtifactError: If tensors are missing, or do not fit one another, `group` or the policy.
        """
        return self.restore(tensors, prompt_rows(self.layout, tensors, group))


def make_rollouts(
    trajectory: Trajectory,
    logp: Float[Tensor, "rollout step"],
    *,
    group: Int[Tensor, " rollout"],
    reward: Float[Tensor, " rollout"],
    outcome: Float[Tensor, " rollout"],
    reference_logp: Float[Tensor, "rollout step"] | None = None,
) -> Rollouts:
    """Returns what an objective may know of a trajectory.

    Args:
      logp: In nats, under the engine that sampled; and `reference_logp` under the base policy.
    """
    return Rollouts(
        group=group,
        reward=reward,
        outcome=outcome,
        mask=trajectory.mask,
        behavior_logp=logp,
        reference_logp=reference_logp,
        noise=trajectory.noise,
        variant=trajectory.variant,
        chunks=trajectory.chunks,
    )


@contextmanager
def cost_of_all_ranks(policy: Policy[Any]) -> Iterator[None]:
    """Adds what all ranks spend inside to the policy's cost, on every rank."""
    before, policy.cost = policy.cost, Cost()
    yield
    policy.cost = before + Cost(*sum_counts([*vars(policy.cost).values()]))
