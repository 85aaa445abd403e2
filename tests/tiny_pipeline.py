"""A DVC repository with small real stages: two arms that fork from a base, and a report."""

import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest
from dvc.repo import Repo

SOURCE = Path(__file__).resolve().parent.parent
PYTHON = sys.executable

PARAMS = """\
seed: 1
seconds: 0.0
rounds:
  a-1: {start: base, rate: 0.1}
  b-1: {start: base, rate: 0.2}
"""

PIPELINE = """\
stages:
  prepare:
    cmd: python work.py prepare artifacts/prompts/train.txt data/prompts.txt
    deps: [data/prompts.txt, work.py]
    params: [seed]
    outs: [artifacts/prompts/train.txt]
  base:
    cmd: python work.py base artifacts/policies/base artifacts/prompts/train.txt
    deps: [artifacts/prompts/train.txt, work.py]
    outs: [artifacts/policies/base]
  train:
    foreach: ${rounds}
    do:
      cmd: >-
        python work.py ${key} artifacts/policies/${key} artifacts/policies/${item.start}
        artifacts/prompts/train.txt
      deps: ["artifacts/policies/${item.start}", artifacts/prompts/train.txt, work.py]
      params: [seconds, "rounds.${key}"]
      outs: ["artifacts/policies/${key}"]
      meta: {exec: {retries: 1, timeout_s: 60}}
  evaluate:
    foreach: ${rounds}
    do:
      cmd: python work.py ${key} artifacts/evaluations/${key}.json artifacts/policies/${key}
      deps: ["artifacts/policies/${key}", work.py]
      metrics: ["artifacts/evaluations/${key}.json"]
  report:
    cmd: python work.py report artifacts/report/metrics.json artifacts/evaluations
    deps: [artifacts/evaluations, artifacts/policies, work.py]
    params: [rounds]
    metrics: [artifacts/report/metrics.json]
"""

# A directory of numbers, a JSON of numbers or a text, made from what was read and the parameters.
WORK = """\
import hashlib, json, os, sys, time
from pathlib import Path
import yaml

name, out, *sources = sys.argv[1:]
params = yaml.safe_load(Path("params.yaml").read_text())
round_ = params["rounds"].get(name, {})
print(f"working on {name}")
Path(".work").mkdir(exist_ok=True)
marks = Path(".work/marks.txt")
with marks.open("a") as file:
    file.write(f"start {name} {time.time()} {os.getpid()}\\n")
if round_ and out.startswith("artifacts/policies"):
    if round_.get("fails"):
        sys.exit(print(f"rounds.{name}.fails must be absent", file=sys.stderr) or round_["fails"])
    time.sleep(params["seconds"])
while Path(f".work/hold-{name}").exists():
    time.sleep(0.02)
files = sorted(f for s in sources for f in ([Path(s)] if Path(s).is_file() else Path(s).rglob("*")))
text = "".join(f.read_text() for f in files if f.is_file()) + json.dumps([name, round_])
number = int(hashlib.md5(text.encode()).hexdigest()[:6], 16)
target = Path(out)
target.parent.mkdir(parents=True, exist_ok=True)
if target.suffix == ".json":
    target.write_text(json.dumps({"value": number, "word": "no number"}))
elif target.suffix == ".txt":
    target.write_text(text)
else:
    target.mkdir()
    (target / "model.txt").write_text(text)
    (target / "summary.json").write_text(json.dumps({"cost": {"flops": number}}))
    (target / "updates.csv").write_text("update,loss,note\\n1,0.5,\\n2,0.25,\\n")
with marks.open("a") as file:
    file.write(f"end {name} {time.time()} {os.getpid()}\\n")
"""


def build(root: Path) -> Path:
    """Makes the repository, with one commit, and returns its root."""
    (root / "data").mkdir(parents=True)
    (root / "data" / "prompts.txt").write_text("1+1=\n")
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text(PIPELINE)
    (root / "work.py").write_text(WORK)
    (root / ".gitignore").write_text("/artifacts/\n/.work/\n/.runs/\n/mlflow.db*\n")
    run(root, "git", "init", "-q", "-b", "main")
    run(root, "git", "config", "user.email", "tests@example.invalid")
    run(root, "git", "config", "user.name", "tests")
    Repo.init(str(root)).close()
    (root / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    commit(root, "the pipeline")
    return root


def commit(root: Path, message: str) -> str:
    """Commits everything and returns the revision."""
    run(root, "git", "add", "-A")
    run(root, "git", "commit", "-q", "-m", message)
    return run(root, "git", "rev-parse", "HEAD").strip()


def reproduce(root: Path, *targets: str) -> str:
    """Runs plain `dvc repro`."""
    return run(root, PYTHON, "-m", "dvc", "repro", "-q", *targets)


def reproduce_in_process(root: Path, *targets: str) -> None:
    """Does what `reproduce` does without a start of DVC."""
    with pytest.MonkeyPatch.context() as patch, chdir(root), Repo() as repo, catch_warnings():
        simplefilter("ignore")  # of libraries of DVC; in tests a warning is an error
        for name, value in environment().items():
            patch.setenv(name, value)
        repo.reproduce([*targets] or None)


def replace(root: Path, old: str, new: str) -> None:
    """Changes params.yaml."""
    path = root / "params.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def copy(root: Path, target: Path) -> Path:
    """Returns a copy of a repository, its cache and its artifacts included."""
    shutil.copytree(root, target, symlinks=True)
    return target


def environment() -> dict[str, str]:
    """Returns the environment in which stages find this Python and this repository's code."""
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def run(root: Path, *command: str) -> str:
    """Runs a command in the repository and returns its output."""
    done = subprocess.run(
        command, cwd=root, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
