"""What an objective is, and how links are composed into one, as optax composes transforms."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.errors import brief
from grpo.objective.link import Link
from grpo.types import Credit, Rollouts, StepNoise, StepTerms, as_float, require_tensor

State = dict[str, dict[str, float]]  # plain data by link name: checkpointed as JSON
LinkState = dict[str, float]


LARGEST_LOG_RATIO = 20.0  # nats; exp(88.8) is no float32


class Objective(NamedTuple):
    """Two halves: credit (once per batch, no model) and loss (every microbatch)."""

    links: tuple[Link, ...]
    init: Callable[[], State]
    credit: Callable[[Credit, Rollouts, State, Generator], tuple[Credit, State]]
    loss: Callable[[StepTerms], StepTerms]


def credit_link(link: Link, credit: Callable[[Credit, Rollouts, Generator], Credit]) -> Objective:
    """Returns a stateless link of the credit half."""

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
    """Returns a link of the credit half that remembers numbers from batch to batch."""

    def stateful(
        before: Credit, rollouts: Rollouts, state: State, generator: Generator
    ) -> tuple[Credit, State]:
        own = state[link.name]
        full = before.full and credit(before.full, rollouts, own, generator.clone_state())[0]
        after, own = credit(before, rollouts, own, generator)
        return _with_full(after, before, full), {**state, link.name: own}

    return Objective((link,), lambda: {link.name: initial}, stateful, lambda terms: terms)


def _with_full(after: Credit, before: Credit, full: Credit | None) -> Credit:
    """Returns `after` whose `full` a link has changed as it changed the rest.

    Args:
      full: What the link made of `before.full`; None if nothing was left out before.
    """
    if full is None:
        return after
    # A link that selects leaves `full` whole.
    return replace(after, full=before.full if full.full else full)


def loss_link(link: Link, loss: Callable[[StepTerms], StepTerms]) -> Objective:
    """Returns a link of the loss half."""
    return Objective(
        (link,), dict, lambda credit, rollouts, state, generator: (credit, state), loss
    )


def chain(*objectives: Objective) -> Objective:
    """Returns the objective that applies each of `objectives` in order, in both halves.

    The composition rules of `grpo check` are not applied: they are those of a pipeline.

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
        raise ValueError(f"a link that keeps state must stand in a chain once, got {names}")

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

    Links see the rollouts that count only. The others have advantage 0 and weight 0, and change
    nothing of the rest, whatever the links are. A batch without a rollout that counts leaves the
    state as it was.
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


def _credit_of_counted(
    objective: Objective, rollouts: Rollouts, state: State, generator: Generator
) -> tuple[Credit, State]:
    mask = rollouts.mask
    start = Credit(
        advantage=rollouts.reward[:, None].expand(mask.shape) * mask,
        weight=mask.to(rollouts.reward.dtype),
    )
    credit, state = objective.credit(start, rollouts, state, generator)
    if credit.weight.shape != mask.shape or credit.advantage.shape != mask.shape:
        raise ValueError(f"credit must keep the shape {tuple(mask.shape)} of the mask")
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
    noise: StepNoise | None = None,
) -> StepTerms:
    """Returns the terms of one microbatch after every loss link.

    Steps of weight 0 are masked on the way in, so that whatever stands there (NaN included)
    changes neither loss nor gradient. Half precision is computed in float32.

    Args:
      proximal_logp: A constant, as are `reference_logp`, `behavior_logp`, the credit and the noise:
        graphs are cut.
      behavior_logp: Under the engine that sampled; links that correct its mismatch need it.
      proximal_kl: Exact, in nats, of Gaussian steps, differentiable as `logp` is; and
        `reference_kl` alike.
      noise: Of Gaussian steps.

    Raises:
      ValueError: If a value is no tensor, a shape is not that of the credit, or a dtype is no
        float.
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
        noise=noise and StepNoise(*(each.detach() for each in noise)),
        mismatch=mismatch,
    )
    return objective.loss(start)


def _require_like_credit(credit: Credit, **values: Tensor | None) -> None:
    """Raises where a broadcast or a dtype would change the answer."""
    require_tensor("weight", credit.weight)
    shape = list(credit.weight.shape)
    for name, value in values.items():
        if value is not None:
            require_tensor(name, value)
        if value is not None and (list(value.shape) != shape or not value.is_floating_point()):
            raise ValueError(
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


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), of at most LARGEST_LOG_RATIO nats: above it there is no gradient.

    Every ratio of two densities is formed here, so that none overflows: an infinite one makes the
    gradient NaN, also where it is clipped. Below, exp underflows to 0 without harm. verl bounds at
    the same value, on both sides.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def noise_of(batch: Rollouts | StepTerms, link: str) -> StepNoise:
    """Returns the noise of the steps.

    Raises:
      ValueError: If they have none.
    """
    if batch.noise is None:
        raise ValueError(f"{link} needs steps with noise: a denoising policy")
    return batch.noise


def scalar_loss(terms: StepTerms, credit: Credit) -> Float[Tensor, ""]:
    """Returns sum(weight * loss): microbatches, ranks and uneven sizes add up exactly.

    Raises:
      ValueError: If the terms are not of these rollouts and steps.
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
) -> Float[Tensor, ""]:
    """Returns `scalar_loss` of `loss_terms`, which say what the arguments are and what is raised.

    For loops that need no metrics of the steps::

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
    )
    return scalar_loss(terms, credit)
