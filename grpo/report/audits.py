"""Audits of a run: how well the used gradient matches the full one, as numbers and sentences."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo.report.reading import AUDITS, Run
from grpo.report.words import format_flops, format_percent, format_rate

COSINE, NORM_RATIO = AUDITS


@dataclass(frozen=True, kw_only=True)
class Audited:
    """Comparison of the used gradient with the full gradient over the audits of some updates."""

    audits: int
    cosine: float  # mean
    lowest_cosine: float
    norm_ratio: float  # mean of norm of the used gradient / norm of the full one
    flops: int  # of the audits, outside the budget

    @property
    def is_full(self) -> bool:
        """Whether every used gradient equaled the full gradient."""
        return self.lowest_cosine == 1.0 and self.norm_ratio == 1.0


def audits_by_round(run: Run) -> dict[str, Audited]:
    """Returns the audit results of each round with audits, in the order of params.yaml."""
    found = {name: audited(run.updates[name], _flops(run, [name])) for name in run.updates}
    return {name: each for name, each in found.items() if each is not None}


def audits_by_arm(run: Run) -> dict[str, Audited]:
    """Returns the audit results over the chain of each arm with audits."""
    found = {}
    for arm in run.arms:
        rounds = run.chain(arm)[1:]
        updates = pd.concat([run.updates[name] for name in rounds])
        found[arm] = audited(updates, _flops(run, rounds))
    return {arm: each for arm, each in found.items() if each is not None}


def audited(updates: pd.DataFrame, flops: int) -> Audited | None:
    """Returns a summary of the audited updates; None if no update was audited."""
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


def format_audits(count: int) -> str:
    """Returns e.g. `1 audit` or `3 audits`."""
    return f"{count} audit{'' if count == 1 else 's'}"


def _sentence(arm: str, each: Audited) -> str:
    if each.is_full:
        return (
            f"The steps that {arm} left out had no gradient: in "
            f"{format_audits(each.audits)}, its update equaled the full one."
        )
    taken = format_flops(float(each.flops))
    return (
        f"In {format_audits(each.audits)}, {arm}'s gradient had a cosine of "
        f"{format_rate(each.cosine)} with the full one (lowest {format_rate(each.lowest_cosine)}) "
        f"and {format_percent(each.norm_ratio)} of its norm; the audits took {taken}, outside the "
        "budget."
    )


def _flops(run: Run, rounds: list[str]) -> int:
    of_audits = run.costs[(run.costs["kind"] == "audit") & run.costs["round"].isin(rounds)]
    return int(sum(of_audits["flops"]))
