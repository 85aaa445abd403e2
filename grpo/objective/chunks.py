"""Selection of the steps to train under a budget: by phase, by advantage, or uniformly."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from grpo.objective.advantage import is_uniform
from grpo.objective.base import LinkState, Objective, credit_link, stateful_credit_link
from grpo.objective.link import Link, Setting
from grpo.types import ActionChunks, Credit, Rollouts

NUM_PHASES = 5
WEIGHTS = ("none", "ht")
SOLVED = 0.5  # an outcome above it is a success

StepWeights = Float[Tensor, "rollout step"]


def sample_chunks_by_phase(
    budget: int, floor: float = 0.1, refresh: int = 5, weights: str = "none"
) -> Objective:
    """Keeps `budget` chunks per rollout, more from phases where successes and failures differ.

    The contrast C_c of a phase is the distance between the mean actions of a group's successes and
    of its failures; p_c = max(floor, C_c / max C). Chunks are drawn without replacement with
    weights p_c. Contrasts are averaged over `refresh` batches, and p_c is constant between; the
    first batch with a group of both outcomes sets the first p_c. [Bagaria et al., 2026, PCM,
    algorithm 1]

    Unlike the paper: contrasts are measured within groups, so that differences between tasks do not
    count. Their squares are averaged and corrected for sampling noise, so that few rollouts do not
    increase them. A phase that was never measured has p = floor.

    Args:
      budget: Number of chunks kept per rollout; a shorter rollout keeps all.
      floor: Lower bound of p_c.
      refresh: Number of batches between updates of p_c.
      weights: "none" averages over the kept chunks of a rollout, as the paper does. "ht" samples
        systematically and divides by the inclusion probability, which is not p_c: unbiased.

    Raises:
      ValueError: If a number is out of range or `weights` unknown; on credit, if steps are not
        chunks of actions.
    """
    draw = _choose_draw(budget, weights, "sample_chunks_by_phase")
    if not 0 <= floor <= 1 or refresh < 1:
        raise ValueError(
            "sample_chunks_by_phase needs floor in [0, 1] and refresh >= 1 batch, "
            f"got {floor} and {refresh}"
        )

    def credit(
        before: Credit, rollouts: Rollouts, state: LinkState, generator: Generator
    ) -> tuple[Credit, LinkState]:
        chunks = _chunks_of(rollouts, "sample_chunks_by_phase")
        state = learn_contrast(state, phase_contrast(rollouts), floor=floor, refresh=refresh)
        keep = torch.tensor([state[f"keep_{phase}"] for phase in range(NUM_PHASES)])
        return draw(before, keep[chunks.phase.clamp(min=0)], generator), state

    settings: dict[str, Setting] = {
        "budget": budget,
        "floor": floor,
        "refresh": refresh,
        "weights": weights,
    }
    return stateful_credit_link(
        Link("sample_chunks_by_phase", settings, "selection", "step selection", "phase selection"),
        _initial_state(),
        credit,
    )


def sample_steps_uniformly(budget: int) -> Objective:
    """Keeps `budget` steps per rollout, drawn uniformly, and divides by the probability: unbiased.

    Args:
      budget: Number of steps kept per rollout; a shorter rollout keeps all.

    Raises:
      ValueError: If `budget` is not positive.
    """
    draw = _choose_draw(budget, "ht", "sample_steps_uniformly")

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        return draw(before, torch.ones_like(before.weight), generator)

    return credit_link(
        Link("sample_steps_uniformly", {"budget": budget}, "selection", "step selection"), credit
    )


def sample_steps_by_advantage(budget: int) -> Objective:
    """Keeps `budget` steps per rollout on average, by importance sampling: unbiased.

    The inclusion probability of a step is proportional to |weight * advantage|, at most 1, and its
    weight is divided by it. For a given budget these probabilities minimize the variance if the
    gradients of all log-probs have the same norm. The rollouts of a batch share one budget: a rare
    success keeps more steps than the failures of its group, and uniform groups keep none.
    [Neyman, 1934; Zhao & Zhang, 2015, arXiv 1401.2753; as PCM's theorem 1, with advantages in place
    of phases]

    Args:
      budget: Mean number of steps kept per rollout with a nonzero advantage.

    Raises:
      ValueError: If `budget` is not positive.
    """
    if budget < 1:
        raise ValueError(f"sample_steps_by_advantage needs budget >= 1, got {budget}")

    def credit(before: Credit, rollouts: Rollouts, generator: Generator) -> Credit:
        size = (before.weight * before.advantage).abs()
        wanted = budget * int((size != 0).any(dim=1).sum())
        line = size.flatten()[None]
        inclusion = inclusion_probabilities(line, line != 0, wanted).view(size.shape)
        taken = draw_systematically(inclusion, generator, in_one_line=True)
        return _keep_weighted(before, taken, inclusion)

    return credit_link(
        Link("sample_steps_by_advantage", {"budget": budget}, "selection", "step selection"), credit
    )


def keep_highest_phase(budget: int, refresh: int = 5) -> Objective:
    """Keeps at most `budget` chunks per rollout from the phase with the highest contrast.

    A baseline of PCM. Chunks of other phases are never trained (rule U34). Of phases with equal
    contrasts all are kept, so all of them before the first contrast is measured.

    Raises:
      ValueError: If a number is not positive; on credit, if steps are not chunks of actions.
    """
    draw = _choose_draw(budget, "none", "keep_highest_phase")
    if refresh < 1:
        raise ValueError(f"keep_highest_phase needs refresh >= 1 batch, got {refresh}")

    def credit(
        before: Credit, rollouts: Rollouts, state: LinkState, generator: Generator
    ) -> tuple[Credit, LinkState]:
        chunks = _chunks_of(rollouts, "keep_highest_phase")
        state = learn_contrast(state, phase_contrast(rollouts), floor=0.0, refresh=refresh)
        contrasts = [state[f"last_{phase}"] for phase in range(NUM_PHASES)]
        highest = torch.tensor([each == max(contrasts) for each in contrasts])
        is_highest = highest[chunks.phase.clamp(min=0)] & (chunks.phase >= 0)
        return draw(before.keep(is_highest), torch.ones_like(before.weight), generator), state

    settings: dict[str, Setting] = {"budget": budget, "refresh": refresh}
    return stateful_credit_link(
        Link("keep_highest_phase", settings, "selection", "step selection", "phase selection"),
        _initial_state(),
        credit,
    )


def phase_contrast(rollouts: Rollouts) -> Float[Tensor, " phase"]:
    """Returns C_c per phase; NaN if no step has two successes and two failures of a group.

    C_c^2 is the mean over groups of |mean action of successes - mean action of failures|^2, minus
    its expectation if both have one distribution: tr(S_1)/n_1 + tr(S_0)/n_0, S the covariance of
    the rollouts' contributions. [PCM, eq. 5]

    Unlike the paper: success and failure are compared step by step, and only at steps that both
    executed. Successes end early, so that their mean over a whole phase would lack its last steps
    and differ from the mean of failures even if both act the same.
    """
    chunks = _chunks_of(rollouts, "phase_contrast")
    solved = rollouts.outcome > SOLVED
    mixed = ~is_uniform(rollouts.outcome, rollouts.group)
    contrasts = torch.full((NUM_PHASES,), torch.nan, dtype=torch.float64)
    for phase in range(NUM_PHASES):
        squares = []
        for group in torch.unique(rollouts.group[mixed]).tolist():
            here = rollouts.group == group
            rows = [(here & side).nonzero()[:, 0] for side in (solved, ~solved)]
            square = _squared_distance([chunks.select(each) for each in rows], phase)
            if square is not None:
                squares.append(square)
        if squares:
            contrasts[phase] = torch.stack(squares).mean().clamp(min=0).sqrt()
    return contrasts


def _squared_distance(outcomes: Sequence[ActionChunks], phase: int) -> Tensor | None:
    """Returns an estimate of the squared distance of two outcomes' mean actions in a phase.

    Steps are weighted by precision, with equal weights for both outcomes. Returns None if no step
    has two executed actions of each outcome.
    """
    sides = [(each.action.double(), _is_executed(each, phase)) for each in outcomes]
    first, second = (here.sum(dim=0).double() for _, here in sides)
    known = (first >= 2) & (second >= 2)
    if not known.any():
        return None
    precision = torch.where(known, first * second / (first + second), 0.0)
    share = precision / precision.sum(dim=0).clamp(min=1)  # two of each have a precision of 1
    means, chance = [], torch.zeros((), dtype=torch.float64)
    for action, here in sides:
        size = here.sum(dim=0).clamp(min=2)
        mean = torch.where(here, action, 0.0).sum(dim=0) / size
        means.append((share * mean).sum(dim=0))
        # The variance is over rollouts: they are independent, the steps of one are not.
        around = torch.where(here, action - mean, 0.0) * share / (size * (size - 1)).sqrt()
        chance += around.sum(dim=1).square().sum()
    return (means[0] - means[1]).square().sum() - chance


def _is_executed(chunks: ActionChunks, phase: int) -> Bool[Tensor, "rollout step number"]:
    return chunks.is_executed & (chunks.phase == phase)[:, :, None]


def learn_contrast(
    state: LinkState, contrast: Float[Tensor, " phase"], *, floor: float, refresh: int
) -> LinkState:
    """Returns the state after one batch: contrasts summed, and p_c updated when due.

    Args:
      contrast: NaN where it was not measured.
    """
    after = {**state, "batches": state["batches"] + 1}
    for phase, value in enumerate(contrast.tolist()):
        if value == value:  # not NaN
            after[f"contrast_{phase}"] += value
            after[f"measured_{phase}"] += 1
    measured = [phase for phase in range(NUM_PHASES) if after[f"measured_{phase}"]]
    is_due = after["batches"] % refresh == 0 or not after["refreshed"]
    if not measured or not is_due:
        return after
    means = {p: after[f"contrast_{p}"] / after[f"measured_{p}"] for p in measured}
    largest = max(means.values())
    for phase in range(NUM_PHASES):
        if phase in means:
            share = means[phase] / largest if largest else 0.0
            after[f"keep_{phase}"] = max(floor, share)
        elif not after["refreshed"]:
            after[f"keep_{phase}"] = floor
        after[f"last_{phase}"] = means.get(phase, after[f"last_{phase}"])
        after[f"contrast_{phase}"] = after[f"measured_{phase}"] = 0.0
    after["refreshed"] += 1
    return after


def _initial_state() -> LinkState:
    """Returns the initial state: all phases have the same probability."""
    state = {"batches": 0.0, "refreshed": 0.0}
    for phase in range(NUM_PHASES):
        state |= {
            f"keep_{phase}": 1.0,
            f"last_{phase}": 0.0,  # contrast from which `keep` was computed
            f"contrast_{phase}": 0.0,  # sum of contrasts since the last update of `keep`
            f"measured_{phase}": 0.0,  # number of batches in that sum
        }
    return state


def _chunks_of(rollouts: Rollouts, link: str) -> ActionChunks:
    if rollouts.chunks is None:
        raise ValueError(f"{link} needs steps that are chunks of actions: policy action_chunks")
    return rollouts.chunks


def _choose_draw(
    budget: int, weights: str, link: str
) -> Callable[[Credit, StepWeights, Generator], Credit]:
    """Returns a function that keeps `budget` of the steps with a nonzero weight.

    Raises:
      ValueError: If `budget` is not positive or `weights` unknown.
    """
    if budget < 1 or weights not in WEIGHTS:
        raise ValueError(
            f"{link} needs budget >= 1 and weights in {WEIGHTS}, got {budget} and {weights!r}"
        )

    def keep_some(before: Credit, chance: StepWeights, generator: Generator) -> Credit:
        candidate = before.weight != 0
        after = before.keep(draw_without_replacement(chance, candidate, budget, generator))
        return replace(after, weight=_restore_rollout_weight(before.weight, after.weight))

    def keep_by_chance(before: Credit, chance: StepWeights, generator: Generator) -> Credit:
        inclusion = inclusion_probabilities(chance, before.weight != 0, budget)
        return _keep_weighted(before, draw_systematically(inclusion, generator), inclusion)

    return keep_by_chance if weights == "ht" else keep_some


def _keep_weighted(
    before: Credit, taken: Bool[Tensor, "rollout step"], inclusion: StepWeights
) -> Credit:
    """Returns the taken steps, weighted by 1 / inclusion. [Horvitz & Thompson, 1952]"""
    after = before.keep(taken)
    # Inverted for taken steps only: 0 times the inverse of an underflowed probability is NaN.
    scale = torch.where(taken, 1 / inclusion, 0.0).to(after.weight.dtype)
    return replace(after, weight=after.weight * scale)


def _restore_rollout_weight(before: StepWeights, kept: StepWeights) -> StepWeights:
    """Returns `kept`, scaled so that the sum of weights of every rollout is that of `before`."""
    total = kept.double().sum(dim=1, keepdim=True)
    scale = before.double().sum(dim=1, keepdim=True) / torch.where(total > 0, total, 1.0)
    # Rollouts that keep all steps must stay bit-identical.
    is_unchanged = (kept == before).all(dim=1, keepdim=True)
    return torch.where(is_unchanged, kept, (kept * scale).to(kept.dtype))


def draw_without_replacement(
    chance: StepWeights,
    candidate: Bool[Tensor, "rollout step"],
    budget: int,
    generator: Generator,
) -> Bool[Tensor, "rollout step"]:
    """Returns `budget` candidates per rollout, drawn sequentially with probability ~ `chance`.

    Implemented as Gumbel top-k: the largest of log w + Gumbel noise. [Plackett-Luce; Kool et al.,
    2019]
    """
    noise = -torch.rand(chance.shape, generator=generator, dtype=torch.float64).log()
    key = torch.where(candidate & (chance > 0), chance.double().log() - noise.log(), -torch.inf)
    best = key.argsort(dim=1, descending=True, stable=True)[:, :budget]
    kept = torch.zeros_like(candidate).scatter(1, best, True)
    return kept & (key > -torch.inf)


def inclusion_probabilities(
    chance: StepWeights, candidate: Bool[Tensor, "rollout step"], budget: int
) -> Float[Tensor, "rollout step"]:
    """Returns min(1, B w / sum of w) in float64; the excess above 1 goes to the other steps.

    The probabilities of a rollout sum to the budget, or to its number of candidates if smaller.
    """
    size = torch.where(candidate, chance.double(), 0.0)
    inclusion = torch.zeros_like(size)
    available = (size > 0).sum(dim=1, keepdim=True)
    certain = (size > 0) & (available <= budget)
    wanted = available.clamp(max=budget).double()
    for _ in range(chance.shape[1]):
        rest = torch.where(certain, 0.0, size)
        left = wanted - certain.sum(dim=1, keepdim=True)
        total = rest.sum(dim=1, keepdim=True)
        inclusion = torch.where(certain, 1.0, left * rest / total.clamp(min=1e-300))
        over = (inclusion >= 1) & ~certain
        if not over.any():
            break
        certain |= over
    return inclusion


def draw_systematically(
    inclusion: Float[Tensor, "rollout step"], generator: Generator, *, in_one_line: bool = False
) -> Bool[Tensor, "rollout step"]:
    """Returns a sample of steps with exactly these inclusion probabilities.

    The number of steps per rollout is the sum of its probabilities. Steps are placed on a line in
    random order, each with the length of its probability; the step at every integer distance from a
    random start is taken. [Madow, 1949, systematic sampling]

    Args:
      in_one_line: Concatenates the lines of all rollouts. Then only the total number of steps is
        fixed: a rollout whose probabilities sum to 2.3 keeps two or three steps.
    """
    order = torch.rand(inclusion.shape, generator=generator).argsort(dim=1)
    lengths = inclusion.gather(1, order)
    lines = lengths.view(1, -1) if in_one_line else lengths
    start = torch.rand(len(lines), 1, generator=generator, dtype=torch.float64)
    line = lines.cumsum(dim=1)
    line = torch.where(line[:, -1:] - line < 1e-9, line[:, -1:].round(), line)
    marks = (line - start).ceil()
    before = torch.cat([torch.zeros_like(marks[:, :1]), marks[:, :-1]], dim=1)
    taken = (marks > before).view(inclusion.shape).gather(1, order.argsort(dim=1))
    return taken & (inclusion > 0)


def neyman_allocation(
    budget: float, counts: Int[Tensor, " phase"], deviations: Float[Tensor, " phase"]
) -> Float[Tensor, " phase"]:
    """Returns b_c = B N_c sqrt(V_c) / sum of N sqrt(V), the allocation of minimum variance.

    [Neyman, 1934; PCM, theorem 1]
    """
    share = counts * deviations
    return budget * share / share.sum()
