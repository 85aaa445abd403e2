"""Measures the effect of faults and the recovery time, by the fault tests with long outages.

python -m benchmarks.faults    # on an idle machine; writes results/faults.json

Runs the tests marked `fault` three times, as root for the full disk. In `make test`, outages are
as short as possible; here they last 20 s.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT = RESULTS / "faults.json"
FOLDERS = ("flows", "storage", "lineage", "registry", "pipeline")  # of tests


def main() -> None:
    """Runs the fault tests, writes the results and prints the table."""
    faults: dict[str, dict[str, Any]] = {}
    for row in _run():
        seconds = round(row.pop("recovery_seconds"), 2)
        faults.setdefault(row["fault"], {**row, "recovery_seconds": []})
        faults[row["fault"]]["recovery_seconds"].append(seconds)
    write_json(
        OUT,
        {
            "command": "python -m benchmarks.faults",
            "revision": revision_of("HEAD"),
            "machine": machine(),
            "faults": list(faults.values()),
        },
    )
    print(table(read_json(OUT)))


def _run() -> list[dict[str, Any]]:
    """Returns the rows that the tests have written."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        folders = [str(ROOT / "tests" / name) for name in FOLDERS]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "fault", *folders],
            cwd=ROOT,
            env={**os.environ, "GRPO_FAULT_ROWS": str(rows)},
            check=True,
        )
        return [json.loads(line) for line in rows.read_text().splitlines()]


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table with a row per fault."""
    titles = ["fault", "what happened", "seconds to recover", "test"]
    rows = list[list[str]]()
    for each in results["faults"]:
        seconds = each["recovery_seconds"]
        middle = f"{np.median(seconds):.1f} [{min(seconds):.1f}, {max(seconds):.1f}]"
        rows.append([each["fault"], each["happened"], middle, f"`{each['test']}`"])
    return markdown_table(titles, rows)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__).parse_args()
    main()
