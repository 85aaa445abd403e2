"""Is the saving honest? The audited updates of a run, as numbers and as sentences."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo.report.reading import AUDITS, Run
from grpo.report.words import say_flops, say_percent, say_rate

COSINE, NORM_RATIO = AUDITS


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What the audits of some updates found; ratios are of the used gradient to the full one."""

    audits: int
    cosine: float  # mean
    lowest_cosine: float
    norm_ratio: float  # mean
    flops: int  # of the audits, beside the budget

    @property
    def is_full(self) -> bool:
        """Whether every used gradient was the full one."""
        return self.lowest_cosine == 1.0 and self.norm_ratio == 1.0


def audits_by_round(run: Run) -> dict[str, Audited]:
    """Returns what was found in each round that has audits, in the file's order."""
    found = {name: audited(run.updates[name], _flops(run, [name])) for name in run.updates}
    return {name: each for name, each in found.items() if each is not None}


def audits_by_arm(run: Run) -> dict[str, Audited]:
    """Returns what was found over an arm's chain, for arms that have audits."""
    found = {}
    for arm in run.arms:
        rounds = run.chain(arm)[1:]
        updates = pd.concat([run.updates[name] for name in rounds])
        found[arm] = audited(updates, _flops(run, rounds))
    return {arm: each for arm, each in found.items() if each is not None}


def audited(updates: pd.DataFrame, flops: int) -> Audited | None:
    """Returns a summary of the audited rows; None if there is none."""
    rows = updates[updates[COSINE].notna()]
    if len(rows) == 0:
        return None
    ratio = rows[NORM_RATIO].to_numpy(np.float64)
    return Audited(
        audits=len(rows),
        cosine=float(rows[COSINE].mean()),
        lowest_cosine=float(rows[COSINE].min()),
        norm_ratio=float(np.nanmean(ratio)) if np.isfinite(ratio).any() else float("nan"),
        flops=flops,
    )


def audit_sentences(found: Mapping[str, Audited]) -> list[str]:
    """Returns one sentence per audited arm."""
    return [_sentence(arm, each) for arm, each in found.items()]


def say_audits(count: int) -> str:
    """Returns e.g. `1 audit` or `3 audits`."""
    return f"{count} audit{'' if count == 1 else 's'}"


def _sentence(arm: str, each: Audited) -> str:
    if each.is_full:
        return (
            f"What {arm} left out had no gradient: in "
            f"{say_audits(each.audits)} its update was the full one."
        )
    taken = say_flops(float(each.flops))
    return (
        f"In {say_audits(each.audits)}, {arm}'s gradient had a cosine of "
        f"{say_rate(each.cosine)} with the full one (lowest {say_rate(each.lowest_cosine)}) and "
        f"{say_percent(each.norm_ratio)} of its length; the audits took {taken}, beside the budget."
    )


def _flops(run: Run, rounds: list[str]) -> int:
    of_audits = run.costs[(run.costs["kind"] == "audit") & run.costs["round"].isin(rounds)]
    return int(sum(of_audits["flops"]))
