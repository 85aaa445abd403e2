"""Outcomes of judges: a score with a status, made from what a judge returned or raised."""

import inspect
import math
import operator
from typing import NamedTuple, SupportsFloat

from grpo.errors import brief, describe_error
from grpo.rewards.base import Part, Scored

ScoreRange = tuple[float, float] | None  # raw scores that map to 0 and 1; None: 0 and 1


class Outcome(NamedTuple):
    """A judge's score in [0, 1] with its status."""

    score: float
    status: str  # scored | unparsable | timed_out | failed | unanswered
    detail: str = ""  # the judge's exception or invalid result, unless the status is "scored"
    parts: tuple[Part, ...] = ()  # scores in [0, 1] of the text's parts, if the judge scores them


def said(error: BaseException) -> str:
    """Returns what an exception says; its type if that raises."""
    try:
        return storable(describe_error(error))
    except BaseException:  # noqa: BLE001  the exception's __str__ may fail
        return storable(type(error).__name__)


def storable(text: str) -> str:
    """Returns a brief text without lone surrogates, which tables cannot store."""
    return brief(text).encode(errors="replace").decode()


def checked(score: object, score_range: ScoreRange) -> Outcome:
    """Returns the outcome for a judge's return value, which may have any type."""
    if inspect.iscoroutine(score):
        score.close()  # avoids Python's warning about a coroutine that was never awaited
        return Outcome(0.0, "failed", "returned a coroutine; a judge must not be async")
    if isinstance(score, str | bytes) or not isinstance(score, SupportsFloat):
        kind = type(score).__name__
        return Outcome(0.0, "failed", storable(f"returned {kind} {score!r}; it must be a number"))
    raw = float(score)
    if not math.isfinite(raw):
        return Outcome(0.0, "failed", f"returned {raw}; it must be finite")
    if score_range is not None:
        low, high = score_range
        return Outcome(min(max((raw - low) / (high - low), 0.0), 1.0), "scored")
    if not 0 <= raw <= 1:
        detail = f"returned {raw!r}, not in [0, 1]; state in its score_range what counts as 0, 1"
        return Outcome(0.0, "failed", detail)
    return Outcome(raw, "scored")


def checked_parts(found: object, text: str, score_range: ScoreRange) -> Outcome:
    """Returns the outcome for the return value of a judge that scores parts of a text."""
    if not isinstance(found, Scored):
        kind = type(found).__name__
        detail = f"returned {kind} {found!r}; with scores_parts it must be a Scored"
        return Outcome(0.0, "failed", storable(detail))
    outcome, parts = checked(found.score, score_range), list[Part]()
    for end, score in found.parts:
        last = parts[-1].end if parts else 0
        if not last < operator.index(end) <= len(text):
            detail = (
                f"returned a part that ends at {end}; ends must rise from 1 to at most {len(text)},"
                " the characters of the text"
            )
            return Outcome(0.0, "failed", detail)
        part = checked(score, score_range)
        if part.status != "scored":
            return part
        parts.append(Part(operator.index(end), part.score))
    return outcome._replace(parts=tuple(parts)) if outcome.status == "scored" else outcome
