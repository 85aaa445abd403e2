"""The circuit breaker of a server: when it is no longer asked, and when it is asked again.

A circuit is closed while a server answers. After some failures in a row it opens: requests end at
once, without waiting for a timeout. After a pause one request, the probe, is sent: an answer closes
the circuit, a failure opens it for another pause. [Nygard, 2007, Release It!, "Circuit Breaker"]
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from grpo.schema import Strict, Timeout


class CircuitSettings(Strict):
    """When a server is not asked, and what becomes of the rollouts that it does not judge."""

    failures: Annotated[int, Field(gt=0, le=1024)]  # requests in a row, after their retries
    pause_seconds: Timeout  # from the last failure to the probe
    # end_stage: the stage ends, a rerun asks again, and every rollout of an artifact was judged.
    # leave_out: the stage goes on; these rollouts have the status `unanswered` and are not trained
    # on, so bytes depend on the outage.
    unanswered: Literal["end_stage", "leave_out"]


@dataclass
class Streak:
    """Failures in a row."""

    failures: int = 0
    opened: bool = False  # whether they opened the circuit: the server was down, not a request bad


Admission = Literal["request", "probe", "no"]


class Circuit:
    """The state of one server as one process sees it; shared by all calls of a judge.

    Without settings it never opens.
    """

    def __init__(
        self, settings: CircuitSettings | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings, self._now = settings, now
        self._streak = Streak()
        self._opened_at: float | None = None  # None: closed
        self._is_probed = False

    def admit(self) -> Admission:
        """Returns whether a request may be sent; after "probe", `report` must follow."""
        if self._opened_at is None:
            return "request"
        assert self.settings is not None
        if self._is_probed or self._now() < self._opened_at + self.settings.pause_seconds:
            return "no"
        self._is_probed = True
        return "probe"

    def report(self, *, answered: bool) -> Streak:
        """Records the end of a request that was sent; returns the failures it ends or adds to."""
        self._is_probed = False
        streak = self._streak
        if answered:
            self._streak, self._opened_at = Streak(), None
            return streak
        streak.failures += 1
        if self.settings is not None and streak.failures >= self.settings.failures:
            streak.opened, self._opened_at = True, self._now()
        return streak

    @property
    def is_open(self) -> bool:
        """Whether requests are not sent, or only a probe."""
        return self._opened_at is not None

    @property
    def state(self) -> str:
        """A phrase for messages about a request that was not sent."""
        assert self.settings is not None
        return (
            f"not asked, the circuit is open after {self._streak.failures} failures in a row; "
            f"probed every {self.settings.pause_seconds:g} seconds"
        )
