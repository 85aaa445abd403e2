"""Metrics, training curves and resource usage of an executed stage."""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo.lineage.lock import StageEntry, file_digest, flatten, read_listing
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.usage import USAGE, Usage

SUMMARY = "summary.json"
CURVES = "updates.csv"
SYSTEM = "system/"  # MLflow shows such metrics in a panel of their own


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One value; `update` is 0 except on a curve."""

    name: str
    value: float
    update: int = 0


def measures(workspace: Path, entry: StageEntry) -> list[Measure]:
    """Returns the numeric leaves of a stage's JSON, the columns of updates.csv, and its usage.

    Files that are missing or differ from the entry's hashes are skipped.
    """
    found: list[Measure] = []
    files = list(_files(workspace, entry))
    tables = [path for path in files if path.suffix == ".json"]
    for path in tables:
        start = f"{path.stem}." if len(tables) > 1 else ""
        found += _numbers(read_json(path), start)
    for path in files:
        if path.name == CURVES:
            found += _curves(path)
    usage = workspace / USAGE / f"{entry.name}.json"
    if usage.exists():
        measured = Usage(**read_json(usage))
        found += _numbers(asdict(measured) | {"spans": []}, "usage.")
        found += [
            Measure(name=f"{SYSTEM}cpu_seconds", value=measured.cpu_seconds),
            Measure(name=f"{SYSTEM}peak_memory_megabytes", value=measured.peak_bytes / 1e6),
        ]
    return found


def ended_at_ms(workspace: Path, entry: StageEntry) -> int | None:
    """Returns when the stage wrote its usage, in milliseconds since 1970, or None."""
    usage = workspace / USAGE / f"{entry.name}.json"
    return int(usage.stat().st_mtime * 1000) if usage.exists() else None


def _files(workspace: Path, entry: StageEntry) -> Iterator[Path]:
    """Yields the entry's JSON outs, and summary.json and updates.csv in its directories."""
    for out in entry.outs:
        path = workspace / out.path
        if path.suffix == ".json" and path.is_file() and file_digest(path) == out.digest:
            yield path
        for name in (SUMMARY, CURVES) if path.is_dir() else ():
            recorded = (read_listing(workspace, out.digest) or {}).get(name)
            if recorded and (path / name).is_file() and file_digest(path / name) == recorded:
                yield path / name


def _numbers(value: object, prefix: str) -> list[Measure]:
    return [
        Measure(name=f"{prefix}{name}", value=float(leaf))
        for name, leaf in flatten(value).items()
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and math.isfinite(leaf)
    ]


def _curves(path: Path) -> Iterator[Measure]:
    """Yields every cell of a table with one row per update."""
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            update = int(row.pop("update"))
            for name, text in row.items():
                value = json.loads(text.lower()) if text else None
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield Measure(name=f"update.{name}", value=float(value), update=update)
