"""Runs each measurement in a new process and records versions and settings."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from benchmarks.peer_trl.workload import Scenario

PACKAGES = ("torch", "transformers")
Measured = dict[str, float]


def measure(side: str, scenario: Scenario, python_of_trl: str) -> Measured:
    """Runs one process of a side with one thread and an empty compile cache."""
    interpreter = sys.executable if side == "ours" else python_of_trl
    with tempfile.TemporaryDirectory() as cache:
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            [interpreter, "-m", f"benchmarks.peer_trl.{side}", json.dumps(asdict(scenario))],
            env={**os.environ, **one_thread, "TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise SystemExit(f"{side} failed on {scenario}:\n{done.stderr}")
    measured: Measured = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def versions(python_of_trl: str) -> dict[str, dict[str, str]]:
    """Returns the versions of both environments."""
    code = (
        "import json; from importlib.metadata import version; "
        f"print(json.dumps({{n: version(n) for n in {('trl', 'accelerate', *PACKAGES)}}}))"
    )
    done = subprocess.run([python_of_trl, "-c", code], capture_output=True, text=True, check=True)
    return {
        "ours": {name: version(name) for name in PACKAGES},
        "theirs": json.loads(done.stdout),
    }


def results(command: str, python_of_trl: str, **content: Any) -> dict[str, Any]:
    """Returns the content of a results file."""
    # Imported here, so that both sides can import this module without these packages.
    from benchmarks.demo import machine, revision_of

    return {
        "command": f"python -m {command}",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "versions": versions(python_of_trl),
        **content,
    }
