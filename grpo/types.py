"""Data types that every modality shares: rollouts, credit, loss terms, log-probs and cost."""

import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo.errors import ShapeError


class StepNoise(NamedTuple):
    """The noise of Gaussian steps; 0 where a step has none."""

    scale: Float[Tensor, "rollout step"]  # |d log p / d v| per unit of noise, v the model's output
    std: Float[Tensor, "rollout step"]
    size: Float[Tensor, "rollout step"]  # decrease of the time, in units of the schedule

    def select(self, rows: Int[Tensor, " kept"], num_steps: int | None = None) -> "StepNoise":
        """Returns some rollouts, cut after `num_steps` steps."""
        return StepNoise(*(each[rows, :num_steps] for each in self))


class ActionChunks(NamedTuple):
    """Chunks of a robot's actions, for methods that compare actions by phase."""

    phase: Int[Tensor, "rollout step"]  # -1 off the mask
    action: Float[Tensor, "rollout step number"]  # used only where it was executed
    is_executed: Bool[Tensor, "rollout step number"]

    def select(self, rows: Int[Tensor, " kept"], num_steps: int | None = None) -> "ActionChunks":
        """Returns some rollouts, cut after `num_steps` steps."""
        return ActionChunks(*(each[rows, :num_steps] for each in self))


class PartScores(NamedTuple):
    """The scores of the parts of rollouts, such as the lines of worked solutions.

    Example: the first rollout has a part that ends at step 2 and one that ends at step 4, the
    second has one part::

        PartScores(end=torch.tensor([[2, 4], [3, -1]]),
                   score=torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    """

    end: Int[Tensor, "rollout part"]  # the last step of the part; -1: no part
    score: Float[Tensor, "rollout part"]  # used only where there is a part

    def select(self, rows: Int[Tensor, " kept"]) -> "PartScores":
        """Returns some rollouts."""
        return PartScores(*(each[rows] for each in self))


NESTED: dict[str, type[StepNoise] | type[ActionChunks] | type[PartScores]] = {
    "noise": StepNoise,
    "chunks": ActionChunks,
    "parts": PartScores,
}
PER_ROLLOUT = (
    "group",
    "reward",
    "outcome",
    "variant",
    "improvement",
    "prompt_weight",
)  # others are per step
PER_NUMBER = ("chunks.action", "chunks.is_executed")  # of each step
PER_PART = ("parts.end", "parts.score")
INTEGERS = ("group", "variant", "chunks.phase", "parts.end")
BOOLEANS = ("mask", "chunks.is_executed")
MAYBE = ("reference_logp", "variant", "improvement", "prompt_weight")  # may be None
REALS = ("reward", "outcome")  # integers and booleans too; all other fields are floats


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """A batch of rollouts as the objective reads it; the same fields for every modality.

    Example: two rollouts of one prompt; the first has two steps, the second has one::

        Rollouts(
            group=torch.tensor([0, 0]),
            reward=torch.tensor([1.0, 0.0]),
            outcome=torch.tensor([1.0, 0.0]),
            mask=torch.tensor([[True, True], [True, False]]),
            behavior_logp=torch.tensor([[-0.1, -0.2], [-0.3, 0.0]]),
        )

    All fields are detached. A rollout whose mask is False at every step is excluded from the
    statistics of its group. Pass a rollout that has no reward, because its environment or its judge
    failed, in this way.

    Raises:
      ValueError: If a field is not a tensor, shapes disagree, a dtype is wrong, a reward, a
        log-prob on the mask or the score of a part is not finite, or a part ends off the mask.
    """

    group: Int[Tensor, " rollout"]  # rollouts of one prompt share an id
    reward: Float[Tensor, " rollout"]  # integers and booleans become float32
    outcome: Float[Tensor, " rollout"]  # raw, unshaped
    mask: Bool[Tensor, "rollout step"]  # False on padding and on steps the policy did not choose
    behavior_logp: Float[Tensor, "rollout step"]  # nats, as the sampler recorded them
    reference_logp: Float[Tensor, "rollout step"] | None = None  # nats, under the reference policy
    noise: StepNoise | None = None  # None: steps are not Gaussian
    variant: Int[Tensor, " rollout"] | None = None  # prompt variant at sampling; 0: the prompt
    chunks: ActionChunks | None = None  # None: steps are not chunks of actions
    # Share of the first answer's error that the rollout removes, 0 if its group was not sampled
    # from a first answer; None: the arm does not revise first answers.
    improvement: Float[Tensor, " rollout"] | None = None
    # Weight of the rollout's prompt in `average_over_prompts`, the inverse of its probability to be
    # drawn in units of the mean; None: 1.
    prompt_weight: Float[Tensor, " rollout"] | None = None
    parts: PartScores | None = None  # None: no judge scores parts

    def __post_init__(self) -> None:
        for name, value in self._fields().items():
            require_tensor(f"Rollouts.{name}", value)
            _require_dtype(name, value.dtype)
        if self.mask.dim() != 2:
            raise ValueError(
                f"Rollouts.mask must have a shape [rollout, step], got {list(self.mask.shape)}"
            )
        for name, value in self._fields().items():
            wanted = self.mask.shape[: 1 if name in PER_ROLLOUT else 2]
            if self.chunks is not None and name in PER_NUMBER:
                wanted += self.chunks.action.shape[-1:]
            if self.parts is not None and name in PER_PART:
                wanted = self.mask.shape[:1] + self.parts.end.shape[-1:]
            if value.shape != wanted:
                raise ValueError(
                    f"Rollouts.{name} must have the shape {list(wanted)} of the mask, "
                    f"got {list(value.shape)}"
                )
        for name in (
            "reward",
            "outcome",
            "behavior_logp",
            "reference_logp",
            "improvement",
            "prompt_weight",
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_float(getattr(self, name).detach()))
        for name, kind in NESTED.items():
            if (nested := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(*(each.detach() for each in nested)))
        self._require_finite("reward", self.counts)
        self._require_finite("behavior_logp", self.mask)
        self._require_finite("reference_logp", self.mask)
        self._require_finite("improvement", self.counts)
        self._require_finite("prompt_weight", self.counts)
        self._require_parts()

    @property
    def counts(self) -> Bool[Tensor, " rollout"]:
        """Whether a rollout has steps; rollouts without steps are ignored and get weight 0."""
        return self.mask.any(dim=1)

    def select(self, rows: Int[Tensor, " kept"]) -> "Rollouts":
        """Returns some rows of every field."""
        return Rollouts(
            group=self.group[rows],
            reward=self.reward[rows],
            outcome=self.outcome[rows],
            mask=self.mask[rows],
            behavior_logp=self.behavior_logp[rows],
            reference_logp=None if self.reference_logp is None else self.reference_logp[rows],
            noise=None if self.noise is None else self.noise.select(rows),
            variant=None if self.variant is None else self.variant[rows],
            chunks=None if self.chunks is None else self.chunks.select(rows),
            improvement=None if self.improvement is None else self.improvement[rows],
            prompt_weight=None if self.prompt_weight is None else self.prompt_weight[rows],
            parts=None if self.parts is None else self.parts.select(rows),
        )

    def _require_parts(self) -> None:
        """Raises unless the parts of rollouts with steps end on the mask and have finite scores."""
        if self.parts is None:
            return
        end, score = self.parts
        is_part = (end != -1) & self.counts[:, None]
        is_step = (end >= 0) & (end < self.mask.shape[1])
        ends_on_mask = is_step & self.mask.gather(1, torch.where(is_step, end, 0))
        wrong = is_part & ~(ends_on_mask & score.isfinite())
        if wrong.any():
            row, part = wrong.nonzero()[0].tolist()
            raise ValueError(
                "Rollouts.parts must end at steps of the mask, or be -1, with finite scores, got "
                f"step {int(end[row, part])} and score {float(score[row, part])} in row {row}, "
                f"part {part}; correct it"
            )

    def _require_finite(self, name: str, counts: Tensor) -> None:
        """Raises if a value where `counts` is True is not finite."""
        value: Tensor | None = getattr(self, name)
        if value is None or value[counts].isfinite().all():
            return
        row, *step = (counts & ~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"Rollouts.{name} must be finite, got {float(value[row, *step])} in row {row}"
            + (f", step {step[0]}; correct it" if step else "; correct it")
            + ", or set the row of the mask to False if it was not judged"
        )

    def _fields(self) -> dict[str, Tensor]:
        """Returns the fields that are not None by name, and those of nested ones."""
        names = ("mask", *PER_ROLLOUT, "behavior_logp", "reference_logp")
        named = {name: getattr(self, name) for name in names}
        named = {
            name: each for name, each in named.items() if each is not None or name not in MAYBE
        }
        for name, kind in NESTED.items():
            nested = getattr(self, name)
            if isinstance(nested, kind):
                named |= {f"{name}.{part}": each for part, each in nested._asdict().items()}
            elif nested is not None:
                found = type(nested).__name__
                raise ValueError(f"Rollouts.{name} must be a grpo.{kind.__name__}, got {found}")
        return named


def require_tensor(name: str, value: object) -> None:
    """Raises ValueError if a value is not a tensor."""
    if not isinstance(value, Tensor):
        found = type(value).__name__
        raise ValueError(f"{name} must be a torch.Tensor, got {found}; use torch.tensor(...)")


def _require_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError if a field of `Rollouts` has the wrong kind of dtype."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    kind, fits = "floats", dtype.is_floating_point
    if name in INTEGERS:
        kind, fits = "integers", is_integer
    elif name in BOOLEANS:
        kind, fits = "bool", dtype == torch.bool
    elif name in REALS:
        kind, fits = "real numbers", not dtype.is_complex
    if not fits:
        raise ValueError(f"Rollouts.{name} must be {kind}, got {dtype}")


def as_float(value: Tensor) -> Tensor:
    """Returns a tensor in float32 or float64; half precision is converted: float16 overflows."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The advantage of every step, and its weight in the sum of the loss."""

    advantage: Float[Tensor, "rollout step"]
    weight: Float[Tensor, "rollout step"]  # 0: the step has no gradient and is not computed
    full: "Credit | None" = None  # credit before any selection; None: no step was dropped

    @property
    def weighted_rows(self) -> Int[Tensor, " kept"]:
        """The rollouts with a nonzero weight; the others need no forward pass."""
        return (self.weight != 0).any(dim=1).nonzero()[:, 0]

    def keep(self, kept: Bool[Tensor, "rollout step"]) -> "Credit":
        """Returns the credit with weight 0 where not `kept`; `full` holds the unselected credit."""
        return replace(self, weight=self.weight * kept, full=self.full or self)

    def select(self, rows: Int[Tensor, " kept"], num_steps: int | None = None) -> "Credit":
        """Returns some rollouts, cut after `num_steps` steps, without `full`."""
        return Credit(
            advantage=self.advantage[rows, :num_steps], weight=self.weight[rows, :num_steps]
        )

    def scatter(self, rows: Int[Tensor, " rollout"], num_rollouts: int) -> "Credit":
        """Returns credit of `num_rollouts` rollouts: this one in `rows`, 0 elsewhere."""
        zeros = self.weight.new_zeros(num_rollouts, self.weight.shape[1])
        return Credit(
            advantage=zeros.to(self.advantage.dtype).index_copy(0, rows, self.advantage),
            weight=zeros.index_copy(0, rows, self.weight),
            full=self.full and self.full.scatter(rows, num_rollouts),
        )


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Per-step quantities of one microbatch; differentiable in logp and log_ratio."""

    logp: Float[Tensor, "rollout step"]  # nats, under the policy being trained
    log_ratio: Float[Tensor, "rollout step"]  # logp minus the proximal policy's
    advantage: Float[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    loss: Float[Tensor, "rollout step"]
    reference_logp: Float[Tensor, "rollout step"] | None = None
    proximal_kl: Float[Tensor, "rollout step"] | None = None  # nats, exact; None: not Gaussian
    reference_kl: Float[Tensor, "rollout step"] | None = None  # nats, exact
    entropy: Float[Tensor, "rollout step"] | None = None  # nats, of each step's distribution
    noise: StepNoise | None = None
    clipped: Bool[Tensor, "rollout step"] | None = None  # where the trust region changed the loss
    mismatch: Float[Tensor, "rollout step"] | None = None  # nats, proximal minus behavior
    mismatch_weight: Float[Tensor, "rollout step"] | None = None  # importance weight applied to it
    dimensions: int = 1  # of a step; the log ratio is the mean over them

    def with_loss(self, loss: Float[Tensor, "rollout step"]) -> "StepTerms":
        """Returns the same terms with `loss` added to their loss.

        Raises:
          ShapeError: If a broadcast would change the answer.
        """
        if loss.shape != self.loss.shape:
            raise ShapeError(
                f"a link's loss must have the shape {list(self.loss.shape)} of the log-probs, got "
                f"{list(loss.shape)}"
            )
        return replace(self, loss=self.loss + loss)


@dataclass(frozen=True, kw_only=True)
class StepLogProbs:
    """Log-probs of the steps of a trajectory under a policy."""

    logp: Float[Tensor, "rollout step"]  # nats
    # Means of Gaussian steps in units of their std: one row per computed step, by rollout.
    mean: Float[Tensor, " computed *sample"] | None = None
    # Nats, of the distribution that each step was drawn from; None: not discrete, or not asked for.
    entropy: Float[Tensor, "rollout step"] | None = None

    def detach(self) -> "StepLogProbs":
        """Returns the same log-probs and means, detached."""
        return StepLogProbs(
            logp=self.logp.detach(), mean=None if self.mean is None else self.mean.detach()
        )


@dataclass(frozen=True)
class Cost:
    """The cost of a computation in counts that do not depend on the machine; costs add."""

    flops: int = 0
    sampled_steps: int = 0
    trained_steps: int = 0
    judge_calls: int = 0  # calls on intermediate samples, in addition to one per rollout

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.sub, vars(self).values(), vars(other).values()))
