"""Banners: what must be read before anything else on the report's page, and on the terminal.

A page is a file: whatever happens after it was drawn is stamped on it, without drawing it again.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.runtime.artifacts.files import known_sha256, write_bytes

ARTIFACTS = Path("artifacts")
PAGE = ARTIFACTS / "report" / "index.html"
# What the page shows. Of policies it shows no weights, and those are large.
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


@dataclass(frozen=True, kw_only=True)
class Banner:
    """A reason not to trust what a page or a summary shows, and what to do.

    Instance::

        Banner(
            title="train@sgpo-2 failed",
            text="update 3: the loss is nan; lower arms.sgpo.training.learning_rate",
        )
    """

    title: str  # short: it is set in bold
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


def stamps(banners: Iterable[Banner]) -> str:
    """Returns the part of a page that `stamp` replaces, as HTML."""
    items = "".join(
        f'<p class="banner" role="alert"><strong>{html.escape(each.title)}</strong> '
        f"{html.escape(each.text)}</p>"
        for each in banners
    )
    return f"<!-- stamps -->{items}<!-- /stamps -->"


def stamp(page: Path, banners: Sequence[Banner]) -> None:
    """Replaces what was stamped on a page, if there is one; what it was drawn with stays."""
    if not page.is_file():
        return
    text = page.read_bytes().decode()
    stamped = STAMPS.sub(lambda _: stamps(banners), text, count=1)
    if stamped != text:
        write_bytes(page, stamped.encode(errors="backslashreplace"))


def hash_inputs(artifacts: Path, *, within: Sequence[Path] | None = None) -> dict[str, str]:
    """Returns a hash of every file that the page shows or counts, by its path in `artifacts`.

    Args:
      within: Only of what is, or lies in, one of these; None: of all.
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
    """Returns whether a file is an input, not DVC's, a temporary one, or a policy's weights."""
    parts = name.split("/")
    is_weights = parts[0] == "policies" and name.endswith(WEIGHTS)
    return not is_weights and not any(part.startswith(".") for part in parts)


def recorded_inputs(page: Path) -> dict[str, str]:
    """Returns the hashes of what a page was drawn from."""
    found = RECORD.search(page.read_text(encoding="utf-8"))
    return dict(json.loads(html.unescape(found[1]))) if found else {}


def changed_inputs(
    page: Path, artifacts: Path, *, within: Sequence[Path] | None = None
) -> list[str]:
    """Returns the files that are not what the page was drawn from; none without a page.

    Args:
      within: As for `hash_inputs`.
    """
    if not page.is_file():
        return []
    after = hash_inputs(artifacts, within=within)
    before = {
        name: known
        for name, known in recorded_inputs(page).items()
        if within is None or any((artifacts / name).is_relative_to(path) for path in within)
    }
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name)]
