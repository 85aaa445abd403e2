"""Runs a benchmark seed by seed and collects the results of finished seeds in one file."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from grpo.runtime.artifacts.files import locked, read_json, write_json


def read_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the results in a folder by the names of their files, in their order."""
    files = {path.stem: path for path in folder.glob("*.json")}
    return {stem: read_json(files[stem]) for stem in sorted(files)}


def record_seeds(
    name: str,
    arms: dict[str, Any],
    run_seed: Callable[[int], Any],
    describe: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    results_name: str | None = None,
) -> dict[str, Any]:
    """Runs the seeds of the command line and returns the content of results/NAME.json.

    Args:
      name: Of the module under benchmarks.
      arms: Definition of the arms; results of a different definition are discarded.
      describe: Returns the summary to store, given the runs of all finished seeds.
      results_name: NAME, if it is not that of the module.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED")
    out = RESULTS / f"{results_name or name}.json"
    lock = ROOT / ".work" / f"{out.stem}.lock"  # other processes may run other seeds meanwhile
    for seed in parser.parse_args().seeds:
        found = run_seed(seed)
        with locked(lock):
            stored = read_json(out) if out.exists() else {}
            if stored.get("arms") != arms:
                stored = {"measured": {}, "runs": {}}
            runs = {**stored["runs"], str(seed): found}
            measured = {"revision": revision_of("HEAD"), "machine": machine()}
            about = {
                "command": f"python -m benchmarks.{name} {' '.join(sorted(runs))}",
                "measured": {**stored["measured"], str(seed): measured},
                "arms": arms,
            }
            write_json(out, {**about, **describe(runs), "runs": runs})
    with locked(lock):
        results: dict[str, Any] = read_json(out)
        results |= describe(results["runs"])  # may be newer than the file
        write_json(out, results)
    return results
