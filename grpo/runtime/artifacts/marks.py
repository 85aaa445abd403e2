"""What became of stages since the page was drawn: a mark for each, stamped on the page at once.

A stage is marked when it starts, so that a killed one is known, too. The mark goes when the stage
has ended well and the page shows what it wrote, or when the page is drawn again.
"""

import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from grpo.errors import GrpoError, without_credentials
from grpo.runtime.artifacts.banners import ARTIFACTS, PAGE, Banner, changed_inputs, stamp
from grpo.runtime.artifacts.checkpoints import WORK
from grpo.runtime.artifacts.files import canonical_json, remove, write_bytes

MARKS = WORK / "marks"
LOCK = WORK / "marks.lock"
NOT_SHOWN = ("check", "lineage", "report")  # stages whose outs the page does not show
AGAIN = "run dvc repro, or python -m grpo report if that finds nothing to do"


class State(StrEnum):
    STARTED = "started"  # and runs, or was killed
    FAILED = "failed"
    FINISHED = "finished"  # and has changed what the page shows


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Mark:
    """What became of a stage."""

    stage: str  # its full name, e.g. rollout@sgpo-2
    state: State
    reason: str = ""  # why it failed


MARK = TypeAdapter(Mark)


@contextmanager
def marked(stage: str, paths: Sequence[Path]) -> Iterator[None]:
    """Marks a stage while the block runs, and after it unless the page shows what is there.

    Args:
      paths: What the stage reads and writes.
    """
    if stage != "lineage":  # which stores a copy of the page
        _write(Mark(stage=stage, state=State.STARTED))
    try:
        yield
    finally:
        error = sys.exception()
        if error:
            fail(stage, error)
        elif stage not in NOT_SHOWN and changed_inputs(PAGE, ARTIFACTS, within=paths):
            _write(Mark(stage=stage, state=State.FINISHED))
        else:
            clear([stage])


def fail(stage: str, error: BaseException) -> None:
    """Marks a stage as failed."""
    said = " ".join(str(error).split()).removeprefix(f"{stage}: ")
    reason = without_credentials(said) or type(error).__name__
    _write(Mark(stage=stage, state=State.FAILED, reason=reason))


def succeed(stage: str) -> None:
    """Removes what says that a stage failed or was killed; not that it has changed something."""
    if any(each.stage == stage and each.state is not State.FINISHED for each in read_marks()):
        clear([stage])


def clear(stages: Sequence[str]) -> None:
    """Removes marks, from the page, too."""
    for stage in stages:
        remove(_path(stage))
    _stamp_page()


def read_marks() -> list[Mark]:
    """Returns the marks of all stages, by name; what is no mark says nothing."""
    marks = []
    # Not by glob, which finds nothing where it may not read.
    for name in sorted(os.listdir(MARKS)) if MARKS.exists() else []:
        if not name.endswith(".json"):
            continue
        try:
            marks.append(MARK.validate_json((MARKS / name).read_bytes()))
        except (ValidationError, FileNotFoundError):  # removed meanwhile
            continue
    return marks


def banners_of(marks: Sequence[Mark]) -> list[Banner]:
    """Returns a banner for every stage that did not end well, and one for all that did."""
    failed = [each for each in marks if each.state is State.FAILED]
    started = [each.stage for each in marks if each.state is State.STARTED]
    finished = [each.stage for each in marks if each.state is State.FINISHED]
    return [
        *(
            Banner(title=f"{each.stage} failed", text=f"{each.reason}. Nothing of it is shown.")
            for each in failed
        ),
        *(
            Banner(
                title=f"{name} has not ended",
                text=f"It started after this page was drawn, and runs or was killed; {AGAIN}.",
            )
            for name in started
        ),
        *([older(finished, "ran")] if finished else []),
    ]


def older(names: Sequence[str], what: str) -> Banner:
    """Returns the banner of a page that does not show what there is now."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return Banner(
        title="The page is older than its inputs",
        text=f"Since it was drawn, {', '.join(names[:4])}{more} {what}; {AGAIN}.",
    )


def _write(mark: Mark) -> None:
    # On a full disk the stage has more to say than that it cannot be marked.
    with suppress(OSError, GrpoError):
        write_bytes(_path(mark.stage), canonical_json(MARK.dump_python(mark, mode="json")))
    _stamp_page()


def _path(stage: str) -> Path:
    return MARKS / f"{stage}.json"


def _stamp_page() -> None:
    """Stamps what all marks say; stages side by side do so one after the other."""
    with suppress(OSError, GrpoError):  # as above
        if not PAGE.exists():
            return
        LOCK.parent.mkdir(parents=True, exist_ok=True)
        with LOCK.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            stamp(PAGE, banners_of(read_marks()))
