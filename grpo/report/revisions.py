"""What revisions of first answers improved, by round."""

from typing import NamedTuple

import pandas as pd

from grpo.report.reading import GROUP, Run
from grpo.runtime.artifacts.tables import FIRST_ANSWER, FIRST_SCORE, SCORE, is_judged
from grpo.sampling.shaping import improvements
from grpo.wiring.allocation import build_selection


class Revised(NamedTuple):
    """Revisions of a round; errors are 1 - score of the judge that the selection names."""

    asked: float  # share of groups with a first answer
    malformed: float  # share of these that have no score
    first_error: float  # mean over groups, as all that follow of groups that revise
    error: float  # mean over rollouts
    better: float  # share of rollouts with a smaller error than the first answer
    improvement: float  # mean over rollouts
    drift: float  # mean of the sum of a group's advantages


def measure_revisions(run: Run) -> dict[str, Revised]:
    """Returns, by round, what revisions improved; without the rounds that revise nothing."""
    found = {}
    for name, rollouts in run.rollouts.items():
        arm = run.params.rounds[name].arm
        revision = build_selection(run.params.find_arm(arm).selection, arm).revision
        if revision:
            found[name] = _measure(rollouts, revision.judge)
    return found


def _measure(rollouts: pd.DataFrame, judge: str) -> Revised:
    groups = rollouts.groupby(GROUP)[[FIRST_ANSWER, FIRST_SCORE]].first()
    is_asked, has_score = groups[FIRST_ANSWER].notna(), groups[FIRST_SCORE].notna()
    revised = rollouts[rollouts[FIRST_SCORE].notna() & is_judged(rollouts)]
    return Revised(
        asked=float(is_asked.mean()),
        malformed=float((~has_score)[is_asked].mean()),
        first_error=float(1 - groups[FIRST_SCORE].mean()),
        error=float(1 - revised[SCORE + judge].mean()),
        better=float((revised[SCORE + judge] > revised[FIRST_SCORE]).mean()),
        improvement=float(improvements(revised, revised, judge).mean()),
        drift=float(revised.groupby(GROUP)["advantage"].sum().mean()),
    )
