"""Marks of stages that ran after the report page was rendered, and banners that show them on it.

The page is a static file: later events are stamped on it without rendering it again. A stage is
marked when it starts, so that a killed stage has a mark, too. The mark is removed when the stage
has succeeded and the page shows its outputs, or when the page is rendered again.
"""

import html
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from grpo.errors import GrpoError, without_credentials
from grpo.runtime.artifacts.files import (
    WORK,
    canonical_json,
    known_sha256,
    locked,
    remove,
    write_bytes,
)

ARTIFACTS = Path("artifacts")
PAGE = ARTIFACTS / "report" / "index.html"
# Directories that the page shows. Weights of policies are not shown, and are large.
INPUTS = (
    "prompts",
    "profile",
    "curricula",
    "rollouts",
    "rewards",
    "training",
    "evaluations",
    "policies",
)
WEIGHTS = ".safetensors"
HASH_CHARACTERS = 16
STAMPS = re.compile(r"<!-- stamps -->.*?<!-- /stamps -->", re.DOTALL)
RECORD = re.compile(r'<meta name="inputs" content="([^"]*)">')
RED, PLAIN = "\x1b[1;31m", "\x1b[0m"
MARKS = WORK / "marks"
LOCK = WORK / "marks.lock"
NOT_SHOWN = ("check", "lineage", "report")  # stages whose outputs the page does not show
AGAIN = "run dvc repro, or python -m grpo report if that finds nothing to do"


@dataclass(frozen=True, kw_only=True)
class Banner:
    """A warning about the content of a page or summary, and the remedy.

    Instance::

        Banner(
            title="train@sgpo-2 failed",
            text="update 3: the loss is nan; lower arms.sgpo.training.learning_rate",
        )
    """

    title: str  # short, shown in bold
    text: str  # one or two sentences

    def __str__(self) -> str:
        return f"{self.title}: {self.text}"


def say(banners: Iterable[Banner], *, is_colored: bool) -> str:
    """Returns a line per banner for a terminal."""
    return "".join(warning(each, is_colored=is_colored) for each in banners)


def warning(text: object, *, is_colored: bool) -> str:
    """Returns a line for a terminal that starts with a red WARNING."""
    start, end = (RED, PLAIN) if is_colored else ("", "")
    return f"{start}WARNING{end} {' '.join(str(text).split())}\n"


def is_colored(stream: TextIO) -> bool:
    """Returns whether to color text on a stream: on terminals, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def stamps(banners: Iterable[Banner]) -> str:
    """Returns the banners as the HTML section that `stamp` replaces."""
    items = "".join(
        f'<p class="banner" role="alert"><strong>{html.escape(each.title)}</strong> '
        f"{html.escape(each.text)}</p>"
        for each in banners
    )
    return f"<!-- stamps -->{items}<!-- /stamps -->"


def stamp(page: Path, banners: Sequence[Banner]) -> None:
    """Replaces the stamped banners of a page, if the page exists; the rest stays the same."""
    if not page.is_file():
        return
    text = page.read_bytes().decode()
    stamped = STAMPS.sub(lambda _: stamps(banners), text, count=1)
    if stamped != text:
        write_bytes(page, stamped.encode(errors="backslashreplace"))


def hash_inputs(artifacts: Path, *, within: Sequence[Path] | None = None) -> dict[str, str]:
    """Returns a hash of every file that the page depends on, by its path in `artifacts`.

    Args:
      within: Restricts the result to these files and directories; None: all.
    """
    places = [artifacts / name for name in INPUTS]
    if within is not None:
        places = [path for path in within if any(path.is_relative_to(place) for place in places)]
    files = {
        file
        for place in places
        for file in (place.rglob("*") if place.is_dir() else [place])
        if file.is_file()
    }
    names = {file.relative_to(artifacts).as_posix(): file for file in sorted(files)}
    return {
        name: known_sha256(file)[:HASH_CHARACTERS] for name, file in names.items() if _counts(name)
    }


def _counts(name: str) -> bool:
    """Returns whether a file is an input: not DVC's, not temporary and not a policy's weights."""
    parts = name.split("/")
    is_weights = parts[0] == "policies" and name.endswith(WEIGHTS)
    return not is_weights and not any(part.startswith(".") for part in parts)


def recorded_inputs(page: Path) -> dict[str, str]:
    """Returns the hashes of the files from which a page was rendered."""
    found = RECORD.search(page.read_text(encoding="utf-8"))
    return dict(json.loads(html.unescape(found[1]))) if found else {}


def changed_inputs(
    page: Path, artifacts: Path, *, within: Sequence[Path] | None = None
) -> list[str]:
    """Returns the files that changed since the page was rendered; none without a page.

    Args:
      within: As for `hash_inputs`.
    """
    if not page.is_file():
        return []
    after = hash_inputs(artifacts, within=within)
    before = recorded_inputs(page)
    if within is not None:  # compared as text, because a page has over a thousand inputs
        places = tuple(f"{path.as_posix()}/" for path in within)
        before = {
            name: known
            for name, known in before.items()
            if f"{artifacts.as_posix()}/{name}/".startswith(places)
        }
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class _Mark:
    """The state of a stage since the page was rendered."""

    stage: str  # full name, e.g. rollout@sgpo-2
    # started: runs, or was killed; finished: and changed inputs of the page
    state: Literal["started", "failed", "finished"]
    reason: str = ""  # why it failed


MARK = TypeAdapter(_Mark)


@contextmanager
def marked(stage: str, paths: Sequence[Path]) -> Iterator[None]:
    """Marks a stage while the block runs, and afterwards if it failed or the page is outdated.

    Args:
      paths: Inputs and outputs of the stage.
    """
    if stage != "lineage":  # which stores a copy of the page
        _write(_Mark(stage=stage, state="started"))
    try:
        yield
    finally:
        error = sys.exception()
        if error:
            fail(stage, error)
        elif stage not in NOT_SHOWN and changed_inputs(PAGE, ARTIFACTS, within=paths):
            _write(_Mark(stage=stage, state="finished"))
        else:
            clear([stage])


def fail(stage: str, error: BaseException) -> None:
    """Marks a stage as failed."""
    said = " ".join(str(error).split()).removeprefix(f"{stage}: ")
    reason = without_credentials(said) or type(error).__name__
    _write(_Mark(stage=stage, state="failed", reason=reason))


def succeed(stage: str) -> None:
    """Removes the mark of a stage that failed or was killed; not if it finished."""
    if any(each.stage == stage and each.state != "finished" for each in read_marks()):
        clear([stage])


def clear(stages: Sequence[str]) -> None:
    """Removes marks and their banners on the page."""
    for stage in stages:
        remove(_path(stage))
    _stamp_page()


def read_marks() -> list[_Mark]:
    """Returns the marks of all stages, sorted by name; ignores invalid files."""
    marks = []
    # Not glob, which returns nothing for an unreadable directory.
    for name in sorted(os.listdir(MARKS)) if MARKS.exists() else []:
        if not name.endswith(".json"):
            continue
        try:
            marks.append(MARK.validate_json((MARKS / name).read_bytes()))
        except (ValidationError, FileNotFoundError):  # removed in the meantime
            continue
    return marks


def banners_of(marks: Sequence[_Mark]) -> list[Banner]:
    """Returns a banner per failed or unfinished stage, and one banner for all finished stages."""
    failed = [each for each in marks if each.state == "failed"]
    started = [each.stage for each in marks if each.state == "started"]
    finished = [each.stage for each in marks if each.state == "finished"]
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
    """Returns the banner of a page that is older than its inputs."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return Banner(
        title="The page is older than its inputs",
        text=f"Since it was drawn, {', '.join(names[:4])}{more} {what}; {AGAIN}.",
    )


def _write(mark: _Mark) -> None:
    # On a full disk the stage's own error matters more than a missing mark.
    with suppress(OSError, GrpoError):
        write_bytes(_path(mark.stage), canonical_json(MARK.dump_python(mark, mode="json")))
    _stamp_page()


def _path(stage: str) -> Path:
    return MARKS / f"{stage}.json"


def _stamp_page() -> None:
    """Stamps the banners of all marks on the page; a lock serializes concurrent stages."""
    with suppress(OSError, GrpoError):  # as above
        if not PAGE.exists():
            return
        with locked(LOCK):
            stamp(PAGE, banners_of(read_marks()))
