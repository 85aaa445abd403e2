"""The type of an objective, and `chain`, which composes links as optax composes transforms."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.errors import ShapeError, brief
from grpo.objective.link import Link
from grpo.types import Credit, Rollouts, StepNoise, StepTerms, as_float, require_tensor

State = dict[str, dict[str, float]]  # plain data by link name: checkpointed as JSON
LinkState = dict[str, float]


LARGEST_LOG_RATIO = 20.0  # nats; exp(88.8) overflows float32


class Objective(NamedTuple):
    """An objective in two parts: credit (once per batch, no model) and loss (per microbatch)."""

    links: tuple[Link, ...]
    init: Callable[[], State]
    credit: Callable[[Credit, Rollouts, State, Generator], tuple[Credit, State]]
    loss: Callable[[StepTerms], StepTerms]


def credit_link(link: Link, credit: Callable[[Credit, Rollouts, Generator], Credit]) -> Objective:
    """Returns a stateless link that changes credit."""

    def stateless(
        before: Credit, rollouts: Rollouts, state: State, generator: Generator
    ) -> tuple[Credit, State]:
        full = before.full and credit(before.full, rollouts, generator.clone_state())
        return _with_full(credit(before, rollouts, generator), before, full), state

    return Objective((link,), dict, stateless, lambda terms: terms)


def stateful_credit_link(
    link: Link,
    initial: LinkState,
    credit: Callable[[Credit, Rollouts, LinkState, Generator], tuple[Credit, LinkState]],
) -> Objective:
    """Returns a link that changes credit and keeps state between batches."""

    def stateful(
        before: Credit, rollouts: Rollouts, state: State, generator: Generator
    ) -> tuple[Credit, State]:
        own = state[link.name]
        full = before.full and credit(before.full, rollouts, own, generator.clone_state())[0]
        after, own = credit(before, rollouts, own, generator)
        return _with_full(after, before, full), {**state, link.name: own}

    return Objective((link,), lambda: {link.name: initial}, stateful, lambda terms: terms)


def continued_state(objective: Objective, stored: State) -> State:
    """Returns the state before a round: the stored one, and the initial one of links without any.

    Args:
      stored: May be of another arm, whose next round gets what only that arm's links read.
    """
    return {**objective.init(), **stored}


def _with_full(after: Credit, before: Credit, full: Credit | None) -> Credit:
    """Returns `after` with the `full` that the link returned for `before.full`.

    Args:
      full: The link's result for `before.full`; None if no step was dropped before.
    """
    if full is None:
        return after
    # A selection does not change `full`.
    return replace(after, full=before.full if full.full else full)


def loss_link(link: Link, loss: Callable[[StepTerms], StepTerms]) -> Objective:
    """Returns a link that changes the loss."""
    return Objective(
        (link,), dict, lambda credit, rollouts, state, generator: (credit, state), loss
    )


def chain(*objectives: Objective) -> Objective:
    """Returns the objective that applies `objectives` in order, to credit and to the loss.

    `chain` does not apply the composition rules of `grpo check`, which hold for a pipeline.

    Raises:
      ValueError: If an argument is not an Objective, or a link with state occurs twice.
    """
    for part in objectives:
        if not isinstance(part, Objective):
            raise ValueError(
                f"chain takes objectives one by one, as in chain(rloo(), penalize_kl(0.01)), got "
                f"{brief(repr(part))}"
            )
    names = [name for part in objectives for name in part.init()]
    if len(names) != len(set(names)):
        raise ValueError(f"a link with state must occur in a chain once, got {names}")

    def init() -> State:
        return {name: own for part in objectives for name, own in part.init().items()}

    def credit(
        before: Credit, rollouts: Rollouts, state: State, generator: Generator
    ) -> tuple[Credit, State]:
        for part in objectives:
            before, state = part.credit(before, rollouts, state, generator)
        return before, state

    def loss(terms: StepTerms) -> StepTerms:
        for part in objectives:
            terms = part.loss(terms)
        return terms

    return Objective(tuple(link for part in objectives for link in part.links), init, credit, loss)


def assign_credit(
    objective: Objective, rollouts: Rollouts, state: State, generator: Generator
) -> tuple[Credit, State]:
    """Returns the credit of a whole batch, starting from advantage = reward, weight = mask.

    Links receive only the rollouts that have steps (`Rollouts.counts`). The others get advantage 0
    and weight 0 and do not affect any other rollout. A batch in which no rollout has steps leaves
    the state unchanged.
    """
    counts = rollouts.counts
    if not counts.any():
        nothing = rollouts.reward.new_zeros(rollouts.mask.shape)
        return Credit(advantage=nothing, weight=nothing), state
    if counts.all():
        return _credit_of_counted(objective, rollouts, state, generator)
    rows = counts.nonzero()[:, 0]
    credit, state = _credit_of_counted(objective, rollouts.select(rows), state, generator)
    return credit.scatter(rows, len(counts)), state


def first_credit(rollouts: Rollouts) -> Credit:
    """Returns the credit before any link: advantage = reward, weight = mask."""
    mask = rollouts.mask
    return Credit(
        advantage=rollouts.reward[:, None].expand(mask.shape) * mask,
        weight=mask.to(rollouts.reward.dtype),
    )


def _credit_of_counted(
    objective: Objective, rollouts: Rollouts, state: State, generator: Generator
) -> tuple[Credit, State]:
    mask = rollouts.mask
    credit, state = objective.credit(first_credit(rollouts), rollouts, state, generator)
    if credit.weight.shape != mask.shape or credit.advantage.shape != mask.shape:
        raise ShapeError(f"credit must keep the shape {tuple(mask.shape)} of the mask")
    return credit, state


def loss_terms(
    objective: Objective,
    *,
    logp: Float[Tensor, "rollout step"],
    proximal_logp: Float[Tensor, "rollout step"],
    credit: Credit,
    reference_logp: Float[Tensor, "rollout step"] | None = None,
    behavior_logp: Float[Tensor, "rollout step"] | None = None,
    proximal_kl: Float[Tensor, "rollout step"] | None = None,
    reference_kl: Float[Tensor, "rollout step"] | None = None,
    entropy: Float[Tensor, "rollout step"] | None = None,
    noise: StepNoise | None = None,
) -> StepTerms:
    """Returns the terms of one microbatch after every loss link.

    Inputs are masked at steps of weight 0, so that their values (NaN included) change neither loss
    nor gradient. Half-precision inputs are converted to float32.

    Args:
      proximal_logp: Detached, as are `reference_logp`, `behavior_logp`, the credit and the noise.
      behavior_logp: Recorded by the sampler; links that correct the sampler's mismatch need it.
      proximal_kl: Exact divergence of Gaussian steps in nats, differentiable like `logp`;
        `reference_kl` likewise.
      entropy: Of the distribution of each step in nats, differentiable like `logp`.
      noise: Of Gaussian steps.

    Raises:
      ValueError: If a value is not a tensor, its shape is not that of the credit, or its dtype is
        not floating-point.
    """
    if noise is not None and not isinstance(noise, StepNoise):
        raise ValueError(f"noise must be a grpo.StepNoise, got {type(noise).__name__}")
    _require_like_credit(
        credit,
        advantage=credit.advantage,
        weight=credit.weight,
        logp=logp,
        proximal_logp=proximal_logp,
        reference_logp=reference_logp,
        behavior_logp=behavior_logp,
        proximal_kl=proximal_kl,
        reference_kl=reference_kl,
        entropy=entropy,
        **{f"noise.{name}": value for name, value in (noise._asdict() if noise else {}).items()},
    )
    mask, logp = credit.weight != 0, as_float(logp)
    zero = torch.zeros((), dtype=logp.dtype)
    logp = torch.where(mask, logp, zero)
    proximal_logp = torch.where(mask, as_float(proximal_logp.detach()), zero)
    mismatch = None
    if behavior_logp is not None:
        mismatch = proximal_logp - torch.where(mask, as_float(behavior_logp.detach()), zero)
    start = StepTerms(
        logp=logp,
        log_ratio=torch.where(mask, logp - proximal_logp, zero),
        advantage=torch.where(mask, credit.advantage.detach(), zero),
        mask=mask,
        loss=torch.zeros_like(logp),
        reference_logp=_masked(mask, None if reference_logp is None else reference_logp.detach()),
        proximal_kl=_masked(mask, proximal_kl),
        reference_kl=_masked(mask, reference_kl),
        entropy=_masked(mask, entropy),
        noise=noise and StepNoise(*(each.detach() for each in noise)),
        mismatch=mismatch,
    )
    return objective.loss(start)


def _require_like_credit(credit: Credit, **values: Tensor | None) -> None:
    """Raises ShapeError if a value's shape or dtype differs: broadcasting would hide it."""
    require_tensor("weight", credit.weight)
    shape = list(credit.weight.shape)
    for name, value in values.items():
        if value is not None:
            require_tensor(name, value)
        if value is not None and (list(value.shape) != shape or not value.is_floating_point()):
            raise ShapeError(
                f"{name} must be floats of the shape {shape} of the credit's weights, got "
                f"{value.dtype} of shape {list(value.shape)}"
            )


def _masked(
    mask: Bool[Tensor, "rollout step"], value: Float[Tensor, "rollout step"] | None
) -> Float[Tensor, "rollout step"] | None:
    if value is None:
        return None
    value = as_float(value)
    return torch.where(mask, value, torch.zeros_like(value))


def mean_over_steps(
    value: Float[Tensor, "rollout step"], mask: Bool[Tensor, "rollout step"]
) -> Float[Tensor, "rollout 1"]:
    """Returns the mean over a rollout's steps, accumulated in float64."""
    total = torch.where(mask, value, 0.0).double().sum(dim=1, keepdim=True)
    return (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(value.dtype)


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp(min(log_ratio, LARGEST_LOG_RATIO)); the gradient above the bound is 0.

    All ratios of densities are computed here, so that none overflows: an infinite ratio makes the
    gradient NaN, even where it is clipped. No lower bound is needed: exp underflows to 0. verl
    clamps at the same value on both sides.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def noise_of(batch: Rollouts | StepTerms, link: str) -> StepNoise:
    """Returns the noise of the steps.

    Raises:
      ValueError: If the steps have no noise.
    """
    if batch.noise is None:
        raise ValueError(f"{link} needs steps with noise: a denoising policy")
    return batch.noise


def scalar_loss(terms: StepTerms, credit: Credit) -> Float[Tensor, ""]:
    """Returns sum(weight * loss): losses of microbatches and ranks add up to the batch loss.

    Raises:
      ValueError: If the shapes of terms and credit differ.
    """
    _require_like_credit(credit, loss=terms.loss)
    return (credit.weight.detach() * torch.where(terms.mask, terms.loss, 0.0)).sum()


def loss(
    objective: Objective,
    *,
    logp: Float[Tensor, "rollout step"],
    proximal_logp: Float[Tensor, "rollout step"],
    credit: Credit,
    reference_logp: Float[Tensor, "rollout step"] | None = None,
    behavior_logp: Float[Tensor, "rollout step"] | None = None,
    entropy: Float[Tensor, "rollout step"] | None = None,
) -> Float[Tensor, ""]:
    """Returns `scalar_loss` of `loss_terms`; see them for the arguments and errors.

    For training loops that do not log per-step metrics::

        rows = credit.weighted_rows
        logp = my_model(tokens[rows])
        part = credit.select(rows)
        grpo.loss(objective, logp=logp, proximal_logp=old_logp[rows], credit=part).backward()
    """
    terms = loss_terms(
        objective,
        logp=logp,
        proximal_logp=proximal_logp,
        credit=credit,
        reference_logp=reference_logp,
        behavior_logp=behavior_logp,
        entropy=entropy,
    )
    return scalar_loss(terms, credit)
