"""Online allocations: selections that choose prompts or group sizes by posteriors of success rates.

A posterior is made of the outcomes of earlier iterations. Their counts are stored in the policy
directory, as the statistics of all selections are.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd

from grpo.allocation.curriculum import require_fraction, require_positive
from grpo.allocation.posterior import Floats, Ints, Posterior, Prior, fit_prior
from grpo.allocation.selection import Budget, History, Offer, Seconds, Selection
from grpo.allocation.signal import (
    LARGEST,
    SIZES,
    draw_systematically,
    group_costs,
    group_values,
    include,
    spend,
)
from grpo.errors import ParameterError
from grpo.objective.link import Link, Setting
from grpo.runtime.artifacts.tables import PROFILED

DRAWS, WEIGHTS = ("thompson", "optimism"), ("none", "ht")
SUCCESSES, FAILURES, STEPS = "successes", "failures", "steps"  # by prompt; mean steps
FLAT = Prior(alpha=1.0, beta=1.0)
ROUNDING = 0.5  # of counts, for the prior: few distinct counts are fitted in less time
FEWEST = 20  # prompts with counts, for a prior of a family
MIXED_CHANCE = 0.9  # with which a knapsack expects a prompt's group to be mixed


def allocate_by_signal(
    budget: float,
    discount: float = 0.9,
    draws: str = "thompson",
    weights: str = "none",
    seconds_per_sampled_step: float = 0.0,
    seconds_per_trained_step: float = 0.0,
    seconds_per_judgement: float = 0.0,
) -> Selection:
    """Chooses prompts and group sizes of the most expected signal for a budget. [ours]

    Maximizes the sum of v (1 - 1/G) over prompts, v = p (1 - p) of a prompt's success rate p, under
    a total expected cost. The posterior of p is Beta(a + s, b + f): s and f are the prompt's
    successes and failures, of which each iteration forgets a share of 1 - discount; the prior
    (a, b) is fitted to the prompts of its family. The phase's prompts are the candidates of every
    iteration.

    Args:
      budget: Of an iteration: FLOPs of sampling and updates by the modality's cost model, or
        seconds if seconds per step are given.
      draws: "thompson": v is that of one draw from the posterior; "optimism": its mean plus its
        standard deviation.
      weights: "none": prompts weigh the same, so that the objective is that of the prompts that are
        drawn; "ht": prompts are drawn with known probabilities and weighted by their inverse, which
        keeps the objective of all prompts. The budget then holds on average.
      seconds_per_sampled_step: Declared, because measured seconds differ between reruns.
    """
    name = "allocate_by_signal"
    seconds = Seconds(seconds_per_sampled_step, seconds_per_trained_step, seconds_per_judgement)
    if not budget > 0:
        raise ParameterError(f"{name}.budget must be above 0, got {budget}")
    if not 0 < discount <= 1:
        raise ParameterError(f"{name}.discount must be in (0, 1], got {discount}")
    _require_one_of(f"{name}.draws", draws, DRAWS)
    _require_one_of(f"{name}.weights", weights, WEIGHTS)
    if min(seconds) < 0 or (any(seconds) and not min(seconds[:2]) > 0):
        raise ParameterError(
            f"{name} needs seconds_per_sampled_step and seconds_per_trained_step above 0, or no "
            f"seconds at all for a budget of FLOPs, got {seconds[0]} and {seconds[1]}"
        )

    def allocate(offer: Offer) -> pd.DataFrame:
        ids, history, price = offer.prompts["prompt_id"].tolist(), offer.history, offer.price
        assert price is not None
        posterior = posterior_of(offer.prompts, history)
        costs = group_costs(
            price.rates(ids, mean_steps(history, ids, price.longest)), posterior, price
        )[:, : price.largest + 1]
        if draws == "thompson":
            rate = posterior.draw(offer.chooser)
            variance = rate * (1 - rate)
        else:
            variance = posterior.outcome_variance() + posterior.outcome_variance_deviation()
        chance = weight = None
        if weights == "ht":
            chance, sizes = include(variance, costs, budget)
            taken = draw_systematically(chance, offer.chooser)
            sizes = sizes * taken
            weight = taken.sum() / (len(ids) * chance) * taken
        else:
            sizes = spend(group_values(variance)[:, : price.largest + 1], costs, budget)
            if not sizes.any():  # no draw has any signal, and an iteration needs a group
                sizes[0] = 2
        cost = costs[np.arange(len(ids)), sizes]
        return _table(ids, sizes, posterior, cost=cost, chance=chance, weight=weight)

    settings: dict[str, Setting] = {
        "budget": budget,
        "discount": discount,
        "draws": draws,
        "weights": weights,
        "seconds_per_sampled_step": seconds_per_sampled_step,
        "seconds_per_trained_step": seconds_per_trained_step,
        "seconds_per_judgement": seconds_per_judgement,
    }
    return Selection(
        links=(Link(name, settings, "prompt selection", "group size"),),
        learn=_count_outcomes(discount, forgets_all=True),
        allocate=allocate,
        sizes=frozenset(range(2, LARGEST + 1)),
        seconds=seconds,
    )


def sample_prompts_near_rate(prompts: int, rate: float = 0.5, discount: float = 0.5) -> Selection:
    """Chooses the prompts whose posterior draws are nearest to a success rate. [MoPPS]

    The posterior of a prompt is Beta(1 + s, 1 + f); its counts s and f are multiplied by `discount`
    when it is sampled again. [Qu et al., 2025, arXiv 2507.04632]

    Unlike the paper: the candidates are all prompts of the phase, not a random batch that is 8 or
    16 times as large as `prompts`.

    Args:
      prompts: Number of prompts that an iteration samples.
      rate: The success rate aimed at.
    """
    name = "sample_prompts_near_rate"
    require_positive(f"{name}.prompts", prompts)
    require_fraction(f"{name}.rate", rate)
    require_fraction(f"{name}.discount", discount)

    def allocate(offer: Offer) -> pd.DataFrame:
        ids = offer.prompts["prompt_id"].tolist()
        posterior = _flat_posterior(offer.history, ids)
        distance = np.abs(posterior.draw(offer.chooser) - rate)
        sizes = np.zeros(len(ids), dtype=np.int64)
        nearest = distance.argsort(kind="stable")[:prompts]
        sizes[nearest] = offer.prompts["rollouts"].to_numpy()[nearest]
        return _table(ids, sizes, posterior)

    settings = {"prompts": prompts, "rate": rate, "discount": discount}
    return Selection(
        links=(Link(name, settings, "prompt selection"),),
        budget=Budget(name, prompts, prompts, 1),
        learn=_count_outcomes(discount, forgets_all=False),
        allocate=allocate,
    )


def size_groups_by_knapsack(prompts: int, rollouts: int) -> Selection:
    """Divides `prompts` times `rollouts` among prompts by their last success rates. [Knapsack RL]

    Maximizes the sum of (1 - p^N - (1 - p)^N) p (1 - p)^2, N in [2, 128]: the probability of a
    mixed group, times the gain of information. Prompts are visited in epochs, in random order. A
    prompt without data gets `rollouts`; one of rate 0 or 1 gets 2. What mixed prompts do not need
    for a mixed group with a probability of 90 % goes to prompts of rate 0. [Li et al., 2025, arXiv
    2509.25849]

    Unlike the paper: solved by marginal gains, which is exact because the value is concave in N.
    The fallback follows its public code.

    Args:
      prompts: Number of prompts that an iteration samples.
      rollouts: Mean number of rollouts of a prompt.
    """
    name = "size_groups_by_knapsack"
    require_positive(f"{name}.prompts", prompts)
    if not 2 <= rollouts <= LARGEST:
        raise ParameterError(f"{name}.rollouts must be in [2, {LARGEST}], got {rollouts}")

    def allocate(offer: Offer) -> pd.DataFrame:
        ids = offer.prompts["prompt_id"].tolist()
        successes, failures = counts_of(offer.history, ids)
        sizes = np.zeros(len(ids), dtype=np.int64)
        total = (successes + failures)[:prompts]
        with np.errstate(invalid="ignore"):
            rate = successes[:prompts] / total  # NaN without data
        sizes[:prompts] = knapsack_sizes(rate, rollouts)
        return _table(ids, sizes, _flat_posterior(offer.history, ids))

    settings = {"prompts": prompts, "rollouts": rollouts}
    return Selection(
        links=(Link(name, settings, "prompt selection", "group size"),),
        budget=Budget(name, prompts, prompts, 1),
        learn=_count_outcomes(0.0, forgets_all=False),
        allocate=allocate,
        sizes=frozenset(range(2, LARGEST + 1)),
    )


def knapsack_sizes(rate: Floats, rollouts: int) -> Ints:
    """Returns the group sizes of `size_groups_by_knapsack`; a rate is NaN without data."""
    sizes = np.where(np.isnan(rate), rollouts, 2)
    rest = int(rollouts * len(rate) - sizes.sum())
    mixed = np.flatnonzero((rate > 0) & (rate < 1))
    others = np.flatnonzero(rate == 0)
    if not len(others):
        others = np.flatnonzero(~((rate > 0) & (rate < 1)))
    p = rate[mixed]
    needed = np.log(1 - MIXED_CHANCE) / np.log(np.maximum(p, 1 - p))
    room = int((LARGEST - sizes[others]).sum())  # what others cannot take is left to mixed prompts
    spare = min(max(rest - int(np.minimum(needed, LARGEST).astype(np.int64).sum()), 0), room)
    if spare and len(others):
        sizes[others] += spare // len(others)
        sizes[others[: spare % len(others)]] += 1
        rest -= spare
    if rest and len(mixed):
        chance = 1 - p[:, None] ** SIZES - (1 - p[:, None]) ** SIZES
        values = (chance - chance[:, 2:3])[:, 2:] * (p * (1 - p) ** 2)[:, None]
        costs = np.broadcast_to(SIZES[:-2].astype(np.float64), values.shape)
        sizes[mixed] += spend(values, costs, float(rest))
    return np.minimum(sizes, LARGEST)


def add_profile(history: History, plan: pd.DataFrame) -> History:
    """Returns the statistics with the profile's outcomes as first data, if they have no counts.

    Args:
      plan: Columns prompt_id, outcome_rate and PROFILED.
    """
    if SUCCESSES in history:
        return history
    solved = plan["outcome_rate"] * plan[PROFILED]
    counts = {SUCCESSES: solved, FAILURES: plan[PROFILED] - solved}
    added = {
        kind: dict(zip(plan["prompt_id"], each.astype(float))) for kind, each in counts.items()
    }
    return {**history, **added}


def counts_of(history: History, ids: list[str]) -> tuple[Floats, Floats]:
    """Returns the discounted successes and failures of prompts."""
    solved, failed = history.get(SUCCESSES, {}), history.get(FAILURES, {})
    return (
        np.array([solved.get(each, 0) for each in ids], dtype=np.float64),
        np.array([failed.get(each, 0) for each in ids], dtype=np.float64),
    )


def posterior_of(prompts: pd.DataFrame, history: History) -> Posterior:
    """Returns the posteriors of prompts under priors that are fitted to the counts of a family.

    A family with counts of fewer than FEWEST prompts has the prior that fits all prompts.
    """
    ids = prompts["prompt_id"].tolist()
    alpha, beta = counts_of(history, ids)
    shared = cache(lambda: fit_to(history, [*history.get(SUCCESSES, {})], fewest=1) or FLAT)
    for _, rows in prompts.groupby("family").indices.items():
        prior = fit_to(history, [ids[row] for row in rows], fewest=FEWEST) or shared()
        alpha[rows] += prior.alpha
        beta[rows] += prior.beta
    return Posterior(alpha=alpha, beta=beta)


def fit_to(history: History, ids: list[str], *, fewest: int) -> Prior | None:
    """Returns the prior that fits the counts of prompts; None if fewer than `fewest` have any."""
    solved, failed = counts_of(history, ids)
    solved, failed = (np.rint(each / ROUNDING) * ROUNDING for each in (solved, failed))
    known = solved + failed > 0
    if known.sum() < fewest:
        return None
    return fit_prior(solved[known], (solved + failed)[known])


def mean_steps(history: History, ids: list[str], longest: float) -> Floats:
    """Returns the mean steps of each prompt's last group; of all prompts if it has none."""
    known = history.get(STEPS, {})
    # fsum: a resumed round has the history in another order, which must not change the sum.
    of_all = math.fsum(known.values()) / len(known) if known else longest
    return np.array([known.get(each, of_all) for each in ids], dtype=np.float64)


def _count_outcomes(
    discount: float, *, forgets_all: bool
) -> Callable[[History, pd.DataFrame], History]:
    """Returns a `learn` that counts outcomes, after it has multiplied earlier counts by `discount`.

    Args:
      forgets_all: Whether counts of prompts that were not sampled are multiplied, too.
    """

    def learn(history: History, groups: pd.DataFrame) -> History:
        sampled = set(groups["prompt_id"])
        found = {SUCCESSES: groups["successes"], FAILURES: groups["rollouts"] - groups["successes"]}
        after: History = {}
        for kind, added in found.items():
            counts = {
                each: count * discount if forgets_all or each in sampled else count
                for each, count in history.get(kind, {}).items()
            }
            for each, count in zip(groups["prompt_id"], added):
                counts[each] = counts.get(each, 0.0) + float(count)
            after[kind] = counts
        steps = dict(zip(groups["prompt_id"], groups["steps"].astype(float)))
        return {**history, **after, STEPS: {**history.get(STEPS, {}), **steps}}

    return learn


def _flat_posterior(history: History, ids: list[str]) -> Posterior:
    """Returns the posteriors under the prior Beta(1, 1)."""
    successes, failures = counts_of(history, ids)
    return Posterior(alpha=FLAT.alpha + successes, beta=FLAT.beta + failures)


def _table(
    ids: list[str],
    sizes: Ints,
    posterior: Posterior,
    *,
    cost: Floats | None = None,
    chance: Floats | None = None,
    weight: Floats | None = None,
) -> pd.DataFrame:
    """Returns an allocation under the schema ALLOCATION."""
    return pd.DataFrame(
        {
            "prompt_id": ids,
            "rollouts": sizes,
            "alpha": posterior.alpha,
            "beta": posterior.beta,
            "cost": math.nan if cost is None else cost,
            "chance": math.nan if chance is None else chance,
            "weight": (sizes > 0).astype(np.float64) if weight is None else weight,
        }
    )


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ParameterError(f"{name} must be one of {known}, got {value!r}")
