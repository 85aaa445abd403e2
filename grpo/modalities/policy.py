"""The interface of policies that sampling, training and evaluation use."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from grpo.modalities.shared.directories import copy_weights
from grpo.modalities.shared.packed import Layout, prompt_rows
from grpo.runtime.dry_run import DryRun
from grpo.runtime.ranks import sum_counts
from grpo.types import ActionChunks, Cost, PartScores, Rollouts, StepLogProbs, StepNoise


@runtime_checkable
class Trajectory(Protocol):
    """The actions of a policy in a batch of rollouts; each modality has its own type."""

    @property
    def mask(self) -> Bool[Tensor, "rollout step"]: ...

    @property
    def noise(self) -> StepNoise | None:
        """Noise parameters of Gaussian steps; None for other steps."""
        ...

    @property
    def variant(self) -> Int[Tensor, " rollout"] | None:
        """The prompt variant of each rollout, 0 for the unchanged prompt; None: no variants."""
        ...

    @property
    def chunks(self) -> ActionChunks | None:
        """The steps as action chunks; None for other steps."""
        ...

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "Trajectory":
        """Returns some rollouts, truncated to `num_steps` steps."""
        ...

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns rollouts and their log-probs as flat tensors that can be concatenated."""
        ...


TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)


class Policy(ABC, Generic[TrajectoryT]):
    """Samples trajectories and computes their log-probs under the same density."""

    cost: Cost  # total over all calls
    simulation_seconds: float = 0.0  # total time spent waiting for a simulator
    decoding: Any  # sampling settings; they define the density

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module that is trained."""

    @abstractmethod
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns `group_sizes[i]` rollouts of prompt i and their log-probs in nats."""

    def sampling_peaks(
        self, run: DryRun, prompts: list[str], *, group_sizes: list[int]
    ) -> dict[str, int]:
        """Returns the largest bytes of the parts of `sample` in a dry run, weights included."""
        generator = Generator()
        return {
            "samples": run.peak_of(
                lambda: self.sample(prompts, group_sizes=group_sizes, generator=generator)
            )
        }

    def longest_rollouts(self, prompts: list[str], *, rollouts: int) -> TrajectoryT:
        """Returns rollouts of the largest length, for measurements of memory."""
        drawn, _ = self.sample(prompts[:1], group_sizes=[1], generator=Generator())
        rows = torch.zeros(rollouts, dtype=torch.long)
        longest: TrajectoryT = drawn.select(rows, drawn.mask.shape[1])  # type: ignore[assignment]
        return longest

    def logits_bytes(self, num_steps: int) -> int:
        """Returns the largest bytes of the logits of an update's steps; 0: not known apart."""
        return 0

    def load_weights(self, path: Path) -> None:
        """Replaces the trained weights by those of a file, for sampling only.

        Raises:
          ArtifactError: If the file belongs to another model.
        """
        copy_weights(self.model, path)

    def sleep(self) -> None:
        """Frees device memory that only sampling needs, until `load_weights` is called."""

    def replayed(self, trajectory: TrajectoryT) -> TrajectoryT:
        """Returns the trajectory for updates, with the routing that they replay, if any."""
        return trajectory

    def log_prob(
        self, trajectory: TrajectoryT, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Float[Tensor, "rollout step"]:
        """Returns the `logp` of `step_log_probs`."""
        return self.step_log_probs(trajectory, needed).logp

    @abstractmethod
    def step_log_probs(
        self,
        trajectory: TrajectoryT,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns differentiable log-probs in nats, and the means of Gaussian steps.

        Args:
          needed: The steps to compute; values at other steps are arbitrary. None: all steps.
          with_entropy: Also returns the entropy of each step's distribution, if it is discrete.
        """

    @abstractmethod
    def decode(self, trajectory: TrajectoryT) -> list[str]:
        """Returns the text of each rollout that a judge reads."""

    def find_steps(self, trajectory: TrajectoryT, ends: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the step that completes the first `end` characters of a text, per end.

        Args:
          ends: Per rollout, numbers of characters of its text in `decode`.

        Raises:
          ValueError: If rollouts of this policy are not texts.
        """
        raise ValueError(f"the rollouts of a {type(self).__name__} are not texts with parts")

    @abstractmethod
    def is_finished(self, trajectory: TrajectoryT) -> Bool[Tensor, " rollout"]:
        """Returns which rollouts ended before the step limit."""

    @abstractmethod
    def widths(
        self,
        trajectory: TrajectoryT,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns the number of positions of each rollout in a pass that scores `needed`."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The layout of the tensors from `Trajectory.pack`."""

    @abstractmethod
    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns the trajectory and behavior log-probs from tensors of this layout.

        Args:
          row: Row of each rollout's prompt.

        Raises:
          ArtifactError: If the tensors do not fit the policy.
        """

    def unpack(
        self, tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
    ) -> tuple[TrajectoryT, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Args:
          group: Group ids in the order of the rollout table.

        Raises:
          ArtifactError: If tensors are missing or inconsistent with each other, with `group` or
            with the policy.
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
    improvement: Float[Tensor, " rollout"] | None = None,
    prompt_weight: Float[Tensor, " rollout"] | None = None,
    parts: PartScores | None = None,
) -> Rollouts:
    """Returns the inputs of an objective for a trajectory.

    Args:
      logp: Log-probs in nats under the sampling engine.
      reference_logp: Log-probs in nats under the reference policy.
      improvement: Share of the first answer's error that each rollout removes.
      prompt_weight: Weight of the rollout's prompt in an average over prompts.
      parts: Scores of the parts of texts.
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
        improvement=improvement,
        prompt_weight=prompt_weight,
        parts=parts,
    )


@contextmanager
def cost_of_all_ranks(policy: Policy[Any]) -> Iterator[None]:
    """Adds the cost of the block, summed over all ranks, to the policy's cost on every rank."""
    before, policy.cost = policy.cost, Cost()
    yield
    policy.cost = before + Cost(*sum_counts([*vars(policy.cost).values()]))
