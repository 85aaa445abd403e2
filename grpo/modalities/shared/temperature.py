"""A sampling temperature that rises when the reward does not. Without torch: flows read it."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from grpo.schema import NonNegative, Positive, Rate, Strict

STATE = "temperature"  # key of the state in the statistics that a policy directory stores
MOST_RAISES = 1000
Statistics = dict[str, dict[str, int | float]]


class RisingTemperature(Strict):
    """A temperature that is raised when the mean reward stops rising. [Garcia-Estrada et al., 2026]

    Iterations are compared in blocks. After each block, the temperature is raised unless the mean
    reward of the block exceeds that of the block before by `tolerance`.

    Unlike the paper: blocks of iterations, not the last 500 steps; `scored_at: null`, with which
    log-probs are those of the density that was sampled.
    """

    first: Rate
    last: Rate
    step: Rate  # of a raise
    iterations: Positive  # of a block
    tolerance: NonNegative  # in units of the reward
    cooldown: Annotated[int, Field(ge=0, le=10**9)]  # iterations after a raise without another one
    scored_at: Rate | None  # of log-probs in updates; null: the temperature of sampling

    @field_validator("last")
    @classmethod
    def _is_not_lower(cls, last: float, info: ValidationInfo) -> float:
        first = info.data.get("first", last)
        if last < first:
            raise ValueError(f"must be at least {first}, the first temperature")
        return last

    @field_validator("step")
    @classmethod
    def _is_not_tiny(cls, step: float, info: ValidationInfo) -> float:
        wide = info.data.get("last", 0.0) - info.data.get("first", 0.0)
        if wide > MOST_RAISES * step:  # samplers have the settings of every level
            raise ValueError(f"must reach the last temperature in at most {MOST_RAISES} raises")
        return step

    @property
    def most_raises(self) -> int:
        """The number of raises that reach the last temperature."""
        return math.ceil((self.last - self.first) / self.step - 1e-9)

    def after(self, raises: int) -> float:
        """Returns the temperature after some raises."""
        return min(self.first + raises * self.step, self.last)

    def learn(self, statistics: Statistics, mean_reward: float) -> Statistics:
        """Returns the statistics after an iteration with a mean reward."""
        state = statistics.get(STATE, {})
        raises, cooldown = int(state.get("raises", 0)), int(state.get("cooldown", 0))
        count = int(state.get("count", 0)) + 1
        total = state.get("total", 0.0) + mean_reward
        known = {"before": state["before"]} if "before" in state else {}
        if count == self.iterations:
            is_flat = bool(known) and total / count - known["before"] <= self.tolerance
            known, count, total = {"before": total / count}, 0, 0.0
            if is_flat and cooldown <= 1 and raises < self.most_raises:
                raises, cooldown = raises + 1, self.cooldown + 1
        after = {"raises": raises, "cooldown": max(cooldown - 1, 0), "count": count, "total": total}
        return {**statistics, STATE: {**after, **known}}


def raises_of(statistics: Mapping[str, Mapping[str, int | float]]) -> int:
    """Returns the number of raises so far, also of rounds of another arm before these."""
    return int(statistics.get(STATE, {}).get("raises", 0))


def _kind_of_temperature(value: Any) -> str:
    return "rising" if isinstance(value, RisingTemperature | dict) else "number"


Temperature = Annotated[
    Annotated[Rate, Tag("number")] | Annotated[RisingTemperature, Tag("rising")],
    Discriminator(_kind_of_temperature),
]
