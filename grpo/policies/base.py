"""What sampling, training and evaluation ask of a policy, whatever its steps are."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

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


TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)


@runtime_checkable
class Policy(Protocol[TrajectoryT]):
    """Samples trajectories and scores them under the very density it samples from."""

    cost: Cost  # grows with every call
    waited_seconds: float  # so far, for what it acts in: a simulator
    decoding: Any  # how it draws: part of its density

    @property
    def model(self) -> nn.Module: ...

    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns `group_sizes[i]` rollouts of prompt i, and their log-probs in nats."""
        ...

    def replayed(self, trajectory: TrajectoryT) -> TrajectoryT:
        """Returns the trajectory as updates score it: with what they repeat of its sampling."""
        ...

    def log_prob(
        self, trajectory: TrajectoryT, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Float[Tensor, "rollout step"]:
        """Returns log-probs in nats, differentiable in the parameters.

        Args:
          needed: The steps to compute; the others may be anything. None: all.
        """
        ...

    def score(
        self, trajectory: TrajectoryT, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Scores:
        """Returns `log_prob`, and the means of Gaussian steps."""
        ...

    def decode(self, trajectory: TrajectoryT) -> list[str]:
        """Returns what a judge reads of each rollout."""
        ...

    def is_finished(self, trajectory: TrajectoryT) -> Bool[Tensor, " rollout"]:
        """Returns which rollouts ended by themselves, not at the step limit."""
        ...

    def widths(
        self,
        trajectory: TrajectoryT,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns how many positions some rollouts occupy in a pass that scores `needed`."""
        ...

    def pack(
        self, trajectory: TrajectoryT, logp: Float[Tensor, "rollout step"]
    ) -> dict[str, Tensor]:
        """Returns a trajectory and its log-probs as flat tensors that can be concatenated."""
        ...

    def repack(
        self,
        tensors: dict[str, Tensor],
        group: Int[Tensor, " rollout"],
        kept: Bool[Tensor, " rollout"],
    ) -> dict[str, Tensor]:
        """Returns what `pack` stored of some rollouts."""
        ...

    def unpack(
        self, tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns what `pack` stored."""
        ...


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
