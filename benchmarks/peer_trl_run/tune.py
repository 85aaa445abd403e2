"""Tries TRL's settings of speed on one seed and prints what each takes.

python -m benchmarks.peer_trl_run.tune PYTHON_OF_TRL [SIZE]    # results/peer_trl_run_tuning.json
"""

import sys
from typing import Any

from benchmarks.demo import RESULTS, machine, revision_of
from benchmarks.peer_trl.processes import versions
from benchmarks.peer_trl_run.runs import FOLDER, require_idle, time_theirs
from benchmarks.peer_trl_run.settings import SIZES
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

TUNING = RESULTS / "peer_trl_run_tuning.json"
KEPT = ("cpu_seconds", "wall_seconds", "peak_bytes", "load_before")


def main(python: str, *sizes: str) -> None:
    """Measures every candidate that the file lacks; settings.py names the fastest by CPU time."""
    runs: list[dict[str, Any]] = read_json(TUNING)["runs"] if TUNING.exists() else []
    for size in sizes or SIZES:
        for settings in SIZES[size].tuned:
            key = {"size": size, "settings": settings}
            if any(key.items() <= each.items() for each in runs):
                continue
            require_idle()
            chosen = {
                "settings": settings,
                "updates_per_save": 0,
                "updates": SIZES[size].trial_updates,
            }
            run = time_theirs(size, SIZES[size].trial_seed, python, FOLDER / "tune", **chosen)
            kept = {name: run[name] for name in KEPT}
            runs.append({**key, **kept, "revision": revision_of("HEAD")})
            print(runs[-1], flush=True)
            command = "python -m benchmarks.peer_trl_run.tune PYTHON_OF_TRL"
            about_run = {"command": command, "machine": machine(), "versions": versions(python)}
            write_json(TUNING, {**about_run, "runs": runs})
    print(table(runs))


def table(runs: list[dict[str, Any]]) -> str:
    """Returns a Markdown table of the candidates."""
    rows = [
        [
            each["size"],
            ", ".join(f"{name} {value}" for name, value in each["settings"].items()),
            f"{each['cpu_seconds']:.1f}",
            f"{each['peak_bytes'] / 1e9:.2f}",
        ]
        for each in runs
    ]
    return markdown_table(["size", "settings", "CPU s", "peak GB"], rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
