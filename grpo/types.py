"""The nouns that every modality shares: rollouts, credit, the terms of a loss, and cost."""

import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor


class StepNoise(NamedTuple):
    """What the noise of Gaussian steps is like; 0 where a step has none."""

    scale: Float[Tensor, "rollout step"]  # |d log p / d v| per unit of noise, v the model's output
    std: Float[Tensor, "rollout step"]
    size: Float[Tensor, "rollout step"]  # by how much the time falls, in units of the schedule

    def select(self, rows: Int[Tensor, " kept"], num_steps: int | None = None) -> "StepNoise":
        """Returns some rollouts, cut after `num_steps` steps."""
        return StepNoise(*(each[rows, :num_steps] for each in self))


class ActionChunks(NamedTuple):
    """What chunks of a robot's actions were, for methods that compare them by phase."""

    phase: Int[Tensor, "rollout step"]  # -1 off the mask
    action: Float[Tensor, "rollout step number"]  # what was carried out, 0 off the mask

    def select(self, rows: Int[Tensor, " kept"]) -> "ActionChunks":
        """Returns some rollouts."""
        return ActionChunks(self.phase[rows], self.action[rows])


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the objective may know of a batch of rollouts, the same for every modality.

    Two rollouts of one prompt, two steps, of which the second rollout used one::

        Rollouts(group=[0, 0], reward=[1.0, 0.0], outcome=[1.0, 0.0],
                 mask=[[True, True], [True, False]], behavior_logp=[[-0.1, -0.2], [-0.3, 0.0]])
    """

    group: Int[Tensor, " rollout"]  # rollouts of one prompt share an id
    reward: Float[Tensor, " rollout"]
    outcome: Float[Tensor, " rollout"]  # raw, unshaped
    mask: Bool[Tensor, "rollout step"]  # False on padding and on steps the policy did not choose
    behavior_logp: Float[Tensor, "rollout step"]  # nats, under the engine that sampled
    reference_logp: Float[Tensor, "rollout step"] | None = None  # nats, under the base policy
    noise: StepNoise | None = None  # None: steps are no Gaussians
    variant: Int[Tensor, " rollout"] | None = None  # of the prompt that it was drawn under; 0: none
    chunks: ActionChunks | None = None  # None: steps are no chunks of actions

    def __post_init__(self) -> None:
        sizes = {len(self.group), len(self.reward), len(self.outcome), len(self.mask)}
        if len(sizes) != 1 or self.mask.shape != self.behavior_logp.shape:
            raise ValueError(f"Rollouts fields must agree in rollouts and steps, got {sizes}")


@dataclass(frozen=True, kw_only=True)
class Credit:
    """How much each step is to be reinforced, and how much it counts in the sum."""

    advantage: Float[Tensor, "rollout step"]
    weight: Float[Tensor, "rollout step"]  # 0: the step needs no gradient and is not computed
    full: "Credit | None" = None  # before any selection; None: nothing was left out

    def select(self, kept: Bool[Tensor, "rollout step"]) -> "Credit":
        """Returns the same credit with weight 0 where not `kept`; `full` stays what it was."""
        return replace(self, weight=self.weight * kept, full=self.full or self)


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Per-step quantities of one microbatch; differentiable in logp and log_ratio."""

    logp: Float[Tensor, "rollout step"]  # nats, under the policy being trained
    log_ratio: Float[Tensor, "rollout step"]  # logp minus the proximal policy's
    advantage: Float[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    loss: Float[Tensor, "rollout step"]
    reference_logp: Float[Tensor, "rollout step"] | None = None
    proximal_kl: Float[Tensor, "rollout step"] | None = None  # nats, exact; None: no Gaussians
    reference_kl: Float[Tensor, "rollout step"] | None = None  # nats, exact
    noise: StepNoise | None = None
    clipped: Bool[Tensor, "rollout step"] | None = None  # where the trust region changed the loss
    mismatch: Float[Tensor, "rollout step"] | None = None  # nats, proximal minus behavior
    mismatch_weight: Float[Tensor, "rollout step"] | None = None  # by what links corrected it
    dimensions: int = 1  # of a step, over which its log ratio is a mean

    def with_loss(self, loss: Float[Tensor, "rollout step"]) -> "StepTerms":
        """Returns the same terms with `loss` added to what is there."""
        return replace(self, loss=self.loss + loss)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a policy scores the steps of a trajectory."""

    logp: Float[Tensor, "rollout step"]  # nats
    # Of Gaussian steps, each in units of its deviation: a row per scored step, rollout by rollout.
    mean: Float[Tensor, " scored *sample"] | None = None

    def detach(self) -> "Scores":
        """Returns the same numbers without their graph."""
        return Scores(
            logp=self.logp.detach(), mean=None if self.mean is None else self.mean.detach()
        )


@dataclass(frozen=True)
class Cost:
    """What a computation cost, independent of the machine that ran it; costs add up."""

    flops: int = 0
    sampled_steps: int = 0
    trained_steps: int = 0
    judge_calls: int = 0  # beside the one per rollout: of what was judged on the way

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.sub, vars(self).values(), vars(other).values()))
