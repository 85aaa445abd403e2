"""Directories that are moved, and processes that are killed while they move them."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

from grpo.runtime.storage.client import Store, Transfer, parse_uri
from grpo.runtime.storage.download import _download

ROOT = Path(__file__).parents[2]
PART_BYTES = 2**16  # what the server of these tests takes, a real one 5 MiB
BRISK = Transfer(
    part_bytes=PART_BYTES,
    parts_at_once=3,
    attempts=3,
    first_wait_seconds=0.01,
    timeout_seconds=1.0,
    outage_seconds=0.0,
)
PARTS = 4  # of the largest file
LARGEST = "weights/model.safetensors"


def write_directory(directory: Path, seed: int = 0) -> Path:
    """Writes files of every kind: empty, small, one part to the byte, many parts and a bit."""
    draw = random.Random(seed)
    sizes = {
        "empty": 0,
        "config.json": 100,
        "one part": PART_BYTES,
        "tokenizer/ü.json": PART_BYTES - 1,
        LARGEST: (PARTS - 1) * PART_BYTES + 1,
    }
    for name, size in sizes.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(draw.randbytes(size))
    return directory


def download_object(uri: str, path: Path, *, sha256: str, transfer: Transfer) -> None:
    """Downloads one file as a directory's files are, with the scratch beside it."""
    work = path.with_name(".scratch")
    work.mkdir(exist_ok=True)
    _download(Store(transfer), parse_uri(uri), path, sha256, work)


def kill_once(arrived: Event, code: str, *arguments: object) -> None:
    """Runs Python code in a process and kills it at a moment."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env=dict(os.environ)
    ) as process:
        while not arrived.wait(0.1):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
