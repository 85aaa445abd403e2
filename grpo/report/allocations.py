"""What online allocations expected and what happened, by round."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo.errors import ArtifactError
from grpo.report.reading import Run
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import ALLOCATION_RECORD
from grpo.wiring.allocation import build_selection

NUMBERS = (
    *("candidates", "never_drawn", "groups", "rollouts", "largest_group"),
    *("expected_mixed", "mixed", "effective_sample_size"),
)
COSTS = ("expected_cost", "cost")
PARTS = ("low", "share", "rollouts", "expected", "solved")


class Bin(NamedTuple):
    """Prompts whose expected success rate is in a bin; rates are NaN without rollouts."""

    low: float
    share: float  # of the sampled rollouts
    expected: float  # mean rate
    solved: float


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """The iterations of a round, or of several, whose prompts or group sizes were allocated."""

    records: Sequence[dict[str, Any]]  # of `compare_forecast`

    @property
    def groups(self) -> int:
        return sum(each["groups"] for each in self.records)

    @property
    def rollouts(self) -> int:
        return sum(each["rollouts"] for each in self.records)

    @property
    def largest_group(self) -> int:
        return int(max(each["largest_group"] for each in self.records))

    @property
    def never_drawn(self) -> float:
        """The share of the candidates that no iteration has drawn, at the end."""
        last = self.records[-1]
        return float(last["never_drawn"] / last["candidates"])

    @property
    def expected_mixed(self) -> float:
        return self._by_group("expected_mixed")

    @property
    def mixed(self) -> float:
        return self._by_group("mixed")

    @property
    def effective_share(self) -> float:
        """The effective sample size of the weights of prompts, divided by the groups."""
        return float(sum(each["effective_sample_size"] for each in self.records) / self.groups)

    @property
    def cost_unit(self) -> str | None:
        """FLOPs or seconds; None: the selection reads no costs."""
        unit: str | None = self.records[0].get("cost_unit")
        return unit

    @property
    def expected_cost(self) -> float:
        return float(sum(each["expected_cost"] for each in self.records))

    @property
    def cost(self) -> float:
        return float(sum(each["cost"] for each in self.records))

    @property
    def bins(self) -> list[Bin]:
        """The sums over iterations by bin of the expected success rate."""
        found = []
        for parts in zip(*(each["bins"] for each in self.records), strict=True):
            share = sum(
                part["share"] * record["rollouts"]
                for part, record in zip(parts, self.records, strict=True)
            )
            counts = [each["rollouts"] for each in parts]
            rates = [
                _mean([each[name] or 0.0 for each in parts], counts)
                for name in ("expected", "solved")
            ]
            found.append(Bin(parts[0]["low"], share / self.rollouts, *rates))
        return found

    def _by_group(self, name: str) -> float:
        return _mean([each[name] for each in self.records], [e["groups"] for e in self.records])


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(np.average(values, weights=weights)) if sum(weights) else float("nan")


def read_allocations(run: Run) -> dict[str, Allocated]:
    """Returns, by round, what was allocated; without the rounds that allocate nothing online.

    Raises:
      ArtifactError: If a record is missing or invalid.
    """
    found = {}
    for name, files in run.iterations.items():
        arm = run.params.rounds[name].arm
        if build_selection(run.params.find_arm(arm).selection, arm).allocate:
            records = [_read_record(each.record / ALLOCATION_RECORD) for each in files]
            found[name] = Allocated(records=records)
    return found


def allocations_by_arm(run: Run) -> dict[str, Allocated]:
    """Returns, by arm, what the rounds on its chain have allocated."""
    rounds = read_allocations(run)
    chains = {
        arm: [rounds[each] for each in run.chain(arm)[1:] if each in rounds] for arm in run.arms
    }
    return {
        arm: Allocated(records=[record for each in chain for record in each.records])
        for arm, chain in chains.items()
        if chain
    }


def _read_record(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("bins"), list):
        raise ArtifactError(f"{path}: 'bins' is missing; rerun the stage train")
    costs = COSTS if "cost_unit" in record else ()
    missing = [each for each in (*NUMBERS, *costs) if type(record.get(each)) not in (int, float)]
    missing += [part for part in PARTS for each in record["bins"] if part not in each]
    if missing:
        raise ArtifactError(f"{path}: {missing[0]!r} is missing; rerun the stage train")
    return record
