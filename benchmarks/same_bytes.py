"""Compares all artifacts of recipes between a revision and HEAD by the hashes in dvc.lock.

python -m benchmarks.same_bytes 85d4b9d params.yaml recipes/smoke.yaml

Both revisions run in fresh clones on this machine. With --locks, a folder keeps the lock files, and
a recipe with a lock file in it does not run again. The exit code is 1 if artifacts differ.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.demo import RESULTS, fresh_clone, machine, revision_of, time_module
from grpo.params.recipes import resolved_text
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import write_json


def main() -> None:
    """Runs each recipe at both revisions, writes the differences and prints a line per recipe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bytes", description=__doc__)
    parser.add_argument("revision", help="revision to compare with HEAD")
    parser.add_argument("recipes", nargs="+", type=Path, help="files of the repository")
    parser.add_argument("--locks", type=Path, help="folder that keeps lock files")
    chosen = parser.parse_args()
    before, after = revision_of(chosen.revision), revision_of("HEAD")
    with tempfile.TemporaryDirectory() as folder:
        locks = (chosen.locks or Path(folder)).resolve()
        found = {
            str(recipe): compare(*(outs_of(each, recipe, locks) for each in (before, after)))
            for recipe in chosen.recipes
        }
    for recipe, each in found.items():
        print(f"{recipe}: {each['equal']} artifacts equal, {len(each['differing'])} not")
    command = f"python -m benchmarks.same_bytes {before} {' '.join(map(str, chosen.recipes))}"
    revisions = {"before": before, "after": after}
    write_json(
        RESULTS / "same_bytes.json",
        {"command": command, **revisions, "machine": machine(), "recipes": found},
    )
    sys.exit(any(each["differing"] for each in found.values()))


def outs_of(revision: str, recipe: Path, locks: Path) -> dict[str, str]:
    """Returns the hashes of a recipe's artifacts at a revision, by path."""
    lock = locks / revision / f"{recipe.stem}.lock"
    if not lock.exists():
        with fresh_clone(revision) as workspace:
            (workspace / "params.yaml").write_text(resolved_text(workspace / recipe))
            time_module(workspace, "flows.reproduce")
            lock.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(workspace / "dvc.lock", lock)
    stages = parse_yaml(lock.read_text())["stages"].values()
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", [])}


def compare(before: dict[str, str], after: dict[str, str]) -> dict[str, Any]:
    """Returns the number of equal artifacts and the paths of different or missing ones."""
    same = before.items() & after.items()
    return {"equal": len(same), "differing": sorted({*before, *after} - {path for path, _ in same})}


if __name__ == "__main__":
    main()
