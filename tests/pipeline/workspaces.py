"""Workspaces of two small arms: fresh checkouts, copies of a finished run, and `dvc` in them."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dvc.repo import Repo

from benchmarks.workspaces import make_workspace, run_stages
from grpo.params.yaml import dump_yaml, parse_yaml
from tests.modalities.exposure import PLANTED

ROOT = Path(__file__).parents[2]
# What a stage reads; the rest of a workspace is DVC's and git's own.
CODE = ("grpo", "stages")
NEEDED_BY_STAGES = (*CODE, "plugins", "data", "artifacts", "params.yaml", "dvc.yaml", "dvc.lock")


def environment() -> dict[str, str]:
    """Returns the environment of a person's shell, with secrets and this Python first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **PLANTED, "PATH": path, "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "true"}


def check_out(target: Path) -> Path:
    """Returns a git repository of the working tree's files, with two small arms to run."""
    listed = _run(ROOT, "git", "ls-files", "-co", "--exclude-standard").splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    write_two_arms(target / "params.yaml")
    (target / "dvc.lock").unlink(missing_ok=True)
    _run(target, "git", "init", "-q", "-b", "main")
    _run(target, "git", "add", "-A")
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
    _run(target, "git", *identity, "commit", "-q", "-m", "the pipeline")
    return target


def two_arms() -> dict[str, Any]:
    """Returns the smoke recipe's parameters with an arm of GRPO before its own."""
    params = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    curriculum = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 16}},
        {"fix_group_size": {"rollouts": 8}},
    ]
    objective = [{"grpo": {"low": 0.2, "high": 0.28, "beta": 0.0}}, "drop_uniform_groups"]
    uniform = {**params["arms"]["sgpo"], "curriculum": curriculum, "objective": objective}
    params["arms"] = {"uniform": uniform, **params["arms"]}
    first = {"arm": "uniform", "start": "base", "phase": 1}
    params["rounds"] = {"uniform-1": first, **params["rounds"]}
    return params


def write_two_arms(target: Path) -> None:
    target.write_text(dump_yaml(two_arms()))


def cut_short(params: dict[str, Any], rounds: Collection[str]) -> dict[str, Any]:
    """Returns a recipe with the named rounds alone, each of two updates on four groups of four."""
    for arm in params["arms"].values():
        arm["curriculum"] = [
            {"split_at_random": {"phases": 1, "prompts_per_phase": 4}},
            {"fix_group_size": {"rollouts": 4}},
        ]
        arm["training"] |= {"updates_per_iteration": 2}
    return {**params, "rounds": {name: params["rounds"][name] for name in rounds}}


def copy_for_stages(finished: Path, target: Path, missing: Collection[str] = ()) -> Path:
    """Returns a copy of what a stage reads and writes: enough to run one by hand.

    Args:
      missing: Names of what the finished run does not have.
    """
    target.mkdir()
    for name in (each for each in NEEDED_BY_STAGES if each not in missing):
        source = finished / name
        if source.is_dir():
            # Nobody writes into the code; Python replaces its own files beside it.
            copy = os.link if name in CODE else shutil.copy2
            shutil.copytree(source, target / name, copy_function=copy)
        else:
            shutil.copyfile(source, target / name)
    return target


def copy_for_dvc(finished: Path, target: Path) -> Path:
    """Returns a whole copy, cache and history included."""
    return Path(shutil.copytree(finished, target, symlinks=True))


def dvc(root: Path, *arguments: str) -> str:
    """Runs dvc and returns what it printed."""
    return _run(root, sys.executable, "-m", "dvc", *arguments)


@contextmanager
def opened(root: Path) -> Iterator[Repo]:
    """Opens a DVC repository in this process, as the current directory."""
    with warnings.catch_warnings(), chdir(root), Repo() as repo:
        warnings.simplefilter("ignore")  # dvc's own
        yield repo


def start_dvc(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts dvc in a session of its own, its output in dvc.log, and returns at once."""
    with (root.parent / f"{root.name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=root,
            env=environment(),
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def start_stages(root: Path, params: dict[str, Any]) -> subprocess.Popen[str]:
    """Starts all stages but report and lineage in one process of their own, without dvc repro."""
    root.mkdir()
    (root / "wanted.yaml").write_text(dump_yaml(params))
    code = (
        "import sys; from pathlib import Path; from grpo.params.yaml import parse_yaml; "
        "from benchmarks.workspaces import make_workspace, run_stages; folder = Path(sys.argv[1]); "
        "make_workspace(folder, parse_yaml((folder / 'wanted.yaml').read_text())); "
        "run_stages(folder)"
    )
    with (root.parent / f"{root.name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, root],
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=log,
            text=True,
        )


def run_stages_in(folder: Path, params: dict[str, Any]) -> Path:
    """Returns a workspace in which all stages but report and lineage have run, in this process."""
    workspace = folder / "workspace"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dvc's own
        make_workspace(workspace, params)
        run_stages(workspace)
    return workspace


def until_done(root: Path, process: subprocess.Popen[str]) -> None:
    """Waits for what `start_stages` started, and shows its log if it failed."""
    assert process.wait(timeout=600) == 0, (root.parent / f"{root.name}.log").read_text()


def locked_stages(root: Path) -> dict[str, Any]:
    """Returns command, dependencies, parameters and outputs of every stage in dvc.lock."""
    return _stages_of((root / "dvc.lock").read_text())


@cache  # most workspaces are copies of one
def _stages_of(lock: str) -> dict[str, Any]:
    return dict(parse_yaml(lock)["stages"])


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
