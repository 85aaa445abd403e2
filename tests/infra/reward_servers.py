"""Reference reward servers of tests: real processes on loopback, and what stands before them."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.infra.files import INFRA, ROOT
from tests.rewards.servers import Response

FUNCTIONS = '''"""Judges of a test."""

import os
import signal
import time
from pathlib import Path


def number(prompts, completions, **columns):
    """Returns a thousandth of the number in each text; what a text orders happens instead."""
    return [perform(each) for each in completions]


def perform(text):
    if text == "raise":
        raise RuntimeError("cannot judge this")
    if text == "nan":
        return float("nan")
    if text == "none":
        return None
    if text == "hang":
        time.sleep(600)
    if text == "crash":
        os._exit(3)
    if text == "token":
        return float(any("token-of-a-test" in each for each in os.environ.values()))
    if text == "print":
        print("what a judge prints is no answer", flush=True)
        return 0.25
    return int(text) / 1000


def short(prompts, completions, **columns):
    """Returns one score too few, unless there is one text."""
    return [0.5] * max(1, len(completions) - 1)


def brightness(media, **columns):
    """Returns the mean of the first pixel over the frames of each item, 255 is 1."""
    return [sum(max(each.convert("L").getdata()) for each in frames) / len(frames) / 255
            for frames in media]


def deadly(completions, **columns):
    """Ends the server in the middle of the first batch with "60"; judges "13" and "14" badly."""
    if "60" in completions and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return [perform({"13": "nan", "14": "raise"}.get(each, each)) for each in completions]


def slow(completions, **columns):
    """Waits until the file `go` exists."""
    Path("judging").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return [int(each) / 1000 for each in completions]
'''


class Running(NamedTuple):
    """A server."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """Ends it as the kernel does when memory is full."""
        self.process.kill()
        self.process.wait()


@contextmanager
def reward_server(
    folder: Path, *options: str, port: int = 0, **environment: str
) -> Iterator[Running]:
    """Runs the server in a folder that has judges.py; yields once its judge is loaded."""
    folder.mkdir(exist_ok=True)
    (folder / "judges.py").write_text(FUNCTIONS)
    process = subprocess.Popen(
        [sys.executable, INFRA / "reward_server.py", *options, "--port", str(port)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        wait_until_ready(url)
        yield Running(url, process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until_ready(url: str) -> None:
    while ask(url.replace("/score", "/health")).status != 200:
        time.sleep(0.02)


def ask(url: str, body: Any = None, **headers: str) -> Response:
    """Returns the answer to a request with JSON, or to GET without a body."""
    content = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers)) as response:
            return Response(response.read(), response.status)
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.read(), error.code, (*error.headers.items(),))


def columns_of(*texts: str) -> dict[str, list[Any]]:
    return {
        "prompts": [*texts],
        "completions": [*texts],
        "answers": [*texts],
        "families": ["f" for _ in texts],
        "entries": [{} for _ in texts],
    }
