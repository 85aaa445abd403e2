"""Times `make demo` in a fresh clone without an environment, from the clone to the summary.

python -m benchmarks.from_nothing params.yaml recipes/translation.yaml recipes/grounding.yaml

Run it on an idle machine. pip and uv may have the packages in their caches. Writes
results/from_nothing.json.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.demo import DEFAULT, RESULTS, SERVERS, fresh_clone, machine, revision_of
from benchmarks.intervals import span
from grpo.report.words import listed
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table

OUT = RESULTS / "from_nothing.json"
LIMITS = {  # in minutes, written down before the recipes were measured
    str(DEFAULT): 8,
    "recipes/translation.yaml": 12,
    "recipes/grounding.yaml": 12,
}


def main() -> None:
    """Times each recipe, and adds it to the results of this revision."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.from_nothing", description=__doc__)
    parser.add_argument("recipes", nargs="+", choices=LIMITS, metavar="RECIPE")
    revision = revision_of("HEAD")
    for recipe in parser.parse_args().recipes:
        load = os.getloadavg()[0]
        found = {**time_demo(revision, recipe), "load_before": round(load, 2)}
        stored: dict[str, Any] = read_json(OUT) if OUT.exists() else {}
        runs = stored["runs"] if stored.get("revision") == revision else {}
        runs |= {recipe: found}
        command = f"python -m benchmarks.from_nothing {' '.join(runs)}"
        write_json(
            OUT, {"command": command, "revision": revision, "machine": machine(), "runs": runs}
        )
    print(table(read_json(OUT)))


def time_demo(revision: str, recipe: str) -> dict[str, float]:
    """Returns the seconds of `make demo RECIPE=...` in a new clone, and those of its set-up."""
    here = str(Path(sys.executable).parent)
    path = [each for each in os.environ["PATH"].split(os.pathsep) if each != here]
    hidden = {*SERVERS, "PYTHONPATH", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    start = time.time()
    with fresh_clone(revision) as clone:
        command = ["make", "demo", *([] if recipe == str(DEFAULT) else [f"RECIPE={recipe}"])]
        subprocess.run(command, cwd=clone, env={**kept, "PATH": os.pathsep.join(path)}, check=True)
        set_up = (clone / ".venv" / "ready").stat().st_mtime - start
        return {"seconds": round(time.time() - start, 1), "set_up_seconds": round(set_up, 1)}


def table(results: dict[str, Any]) -> str:
    """Returns the table of docs/recipes.md."""
    rows = [
        [
            f"`{Path(recipe).name}`",
            _in_minutes(found["seconds"]),
            _in_minutes(found["set_up_seconds"]),
            f"{limit} min",
        ]
        for recipe, limit in LIMITS.items()
        if recipe in results["runs"]
        for found in [results["runs"][recipe]]
    ]
    return markdown_table(["recipe", "from nothing", "of it set-up", "limit"], rows)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what the README says of the default recipe and docs/recipes.md of limits."""
    runs = results["runs"]
    took = _in_minutes(runs[str(DEFAULT)]["seconds"])
    beyond = {
        f"`{Path(recipe).name}`": runs[recipe]["seconds"] - 60 * limit
        for recipe, limit in LIMITS.items()
        if runs[recipe]["seconds"] > 60 * limit
    }
    said = "All are within their limits"
    if beyond:
        said = f"Above the limit: {listed([*beyond])}, by {span([*beyond.values()])} s"
    return [f"From nothing `make demo` took {took}, set-up included", said]


def _in_minutes(seconds: float) -> str:
    return f"{round(seconds) // 60} min {round(seconds) % 60} s"


if __name__ == "__main__":
    main()
