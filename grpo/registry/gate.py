"""The promotion gate: a significant gain in mean@k, and no large loss in any prompt family."""

from dataclasses import dataclass

import pandas as pd

from grpo.errors import ParameterError
from grpo.report.comparison import Interval, difference, draw_resamples, resample_means
from grpo.sampling.evaluation import LEAST_PROMPTS, per_prompt_metrics

RESAMPLES = 4000
CONFIDENCE = 0.95
CHALLENGER, CHAMPION = "challenger", "champion"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Thresholds of the gate."""

    margin: float = 0.0  # lower bound that the confidence interval of the gain must exceed
    family: float = 0.1  # maximum loss in mean@k of a prompt family

    def __post_init__(self) -> None:
        if not (0 <= self.margin < 1 and 0 <= self.family <= 1):
            raise ParameterError(
                f"margin must be in [0, 1) and family in [0, 1], got {self.margin} and "
                f"{self.family}"
            )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the gate."""

    difference: Interval | None  # gain in mean@k; None: not comparable
    reason: str  # why the challenger was refused; empty: accepted


def judge(challenger: pd.DataFrame, champion: pd.DataFrame, bounds: Bounds) -> Verdict:
    """Compares two policies on the same prompts.

    The lower end of the paired bootstrap interval of the gain in mean@k must exceed `margin`, so a
    tie is refused.

    Args:
      challenger: Schema EVALUATION, as for `champion`.
    """
    pair = {CHALLENGER: challenger, CHAMPION: champion}
    tables = {name: each.set_index("prompt_id").sort_index() for name, each in pair.items()}
    first, second = tables.values()
    if not first.index.equals(second.index) or not (first["rollouts"] == second["rollouts"]).all():
        return Verdict(difference=None, reason="was evaluated on other prompts than the champion")
    if reason := too_few_prompts(first):
        return Verdict(difference=None, reason=reason)
    rates = pd.DataFrame({n: per_prompt_metrics(t)["mean_at_k"] for n, t in tables.items()})
    draws = draw_resamples(len(rates), resamples=RESAMPLES, seed=0)
    means = resample_means(rates, draws)
    gain = difference(rates, means, (CHALLENGER, CHAMPION), confidence=CONFIDENCE)
    assert gain.low is not None
    if gain.low <= bounds.margin:
        return Verdict(
            difference=gain,
            reason=f"gains {say(gain)} in mean@k, not beyond {bounds.margin:g} with "
            f"{CONFIDENCE:.0%} confidence",
        )
    by_family = rates.groupby(first["family"]).mean()
    losses = (by_family[CHAMPION] - by_family[CHALLENGER]).round(9)
    if losses.max() > bounds.family:
        return Verdict(
            difference=gain,
            reason=f"loses {losses.max():.3f} in mean@k on {losses.idxmax()}, more than "
            f"{bounds.family:g}",
        )
    return Verdict(difference=gain, reason="")


def too_few_prompts(evaluation: pd.DataFrame) -> str:
    """Returns why a policy is refused whose evaluation has too few prompts; "" if it has not."""
    if len(evaluation) >= LEAST_PROMPTS:
        return ""
    return (
        f"was evaluated on {len(evaluation)} prompts, fewer than the {LEAST_PROMPTS} that a "
        "comparison needs; raise task.eval_prompts"
    )


def say(interval: Interval) -> str:
    """Returns "+0.050 [+0.010, +0.090]"."""
    return f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
