"""What a run shows to others: secrets of its environment in files, and sockets."""

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pandas as pd
import psutil

Found = TypeVar("Found")
LOOPBACK = "127.0.0.1"
NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "UNKNOWN_TOOL_TOKEN",
)
# Made, not written: a workspace holds a copy of this file.
PLANTED = {name: f"{name}-planted".lower()[::-1] for name in NAMES}


def leaks(root: Path) -> list[str]:
    """Returns where below a directory a planted secret stands, and which."""
    return [
        f"{path.relative_to(root)}: {name}"
        for path in sorted(root.rglob("*"))
        if path.is_file()
        for content in [_plain(path)]
        for name, secret in PLANTED.items()
        if secret.encode() in content
    ]


def _plain(path: Path) -> bytes:
    """Returns a file's bytes; a table's as text, for they are compressed."""
    content = path.read_bytes()
    return pd.read_parquet(path).to_csv().encode() if content.startswith(b"PAR1") else content


def listening() -> set[str]:
    """Returns the addresses on which processes below this one wait for connections."""
    return {
        each.laddr.ip
        for _, connections in asked_below(lambda process: process.net_connections(kind="inet"))
        for each in connections
        if each.status == psutil.CONN_LISTEN
    }


def allowed_origin(address: str, origin: str) -> str | None:
    """Returns the origin that a server lets use its API, asked as a browser asks first."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(address, headers=asked)
    with urllib.request.urlopen(request) as answer:
        found: str | None = answer.headers["Access-Control-Allow-Origin"]
        return found


def commands() -> list[str]:
    """Returns the command lines of processes below this one, which every user can read."""
    return [" ".join(words) for _, words in asked_below(psutil.Process.cmdline)]


def asked_below(ask: Callable[[psutil.Process], Found]) -> Iterator[tuple[psutil.Process, Found]]:
    """Yields the processes that this one and those below it have started, and what each answers."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE:  # another test's, not waited for yet
                yield process, ask(process)
