"""Runs a stage of a commit on this host, in a separate clone with only the stage's input data."""

import fcntl
import itertools
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dvc.config import Config, merge
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.stage import Stage
from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update

from flows.planning import Step, explain, hints_of
from flows.remote_data import reached
from flows.runner import STAGES_LOCK, Runner, Stopped
from flows.wire import Answer, Order
from grpo.errors import CREDENTIALS, ArtifactError, ParameterError, brief
from grpo.lineage.lock import LOCK, overlap
from grpo.lineage.revision import git
from grpo.params.manifests import MANIFESTS
from grpo.runtime.artifacts.files import read_json, remove

REPOSITORY = "GRPO_REPOSITORY"
HOME = "GRPO_WORKER_HOME"
KEPT = ".work"  # kept between runs: checkpoints, each bound to its code, inputs and parameters
PLACE = Path(KEPT) / "place-of-a-worker"  # marks a directory that a worker may empty
SETUP = "requirements.lock"
SSH_USER = re.compile(r"ssh://[^\s/@:]+@")  # a user name without a password
NOT_THERE = "not our ref"  # git's message for a missing commit


class StageRun:
    """Executes one order on this host.

    Args:
      workspace: The host's own clone, whose .dvc/config.local applies to all runs.
      home: Directory of clones and DVC's cache; can be deleted while no stage runs.
      repository: URL from which git can fetch the commit.
      show: Called with the stage's name and each line that it prints.
    """

    def __init__(
        self,
        order: Order,
        *,
        workspace: Path,
        home: Path,
        repository: str,
        show: Callable[[str, str], None],
    ) -> None:
        self.order = order
        self.workspace = workspace
        self.home = home.absolute()
        self.repository = repository
        self.show = show
        self.stopped = threading.Event()
        self.runner: Runner | None = None

    def carry_out(self) -> Answer:
        """Returns the stage's entry in dvc.lock after pushing its outs.

        Raises:
          ParameterError: If the order or this host's environment is wrong.
          ArtifactError: If the commit or data cannot be fetched, or outs cannot be pushed.
          StageError: If the stage failed.
          Stopped: If `stop` was called.
        """
        with _free_place(self.home) as (place, lock):
            _check_out(place, self.repository, self.order.commit)
            _require_same_setup(place)
            entries = {"schema": "2.0", "stages": dict(self.order.entries)}
            (place / LOCK).write_text(dumps_yaml(entries))
            _set_up_dvc(place, self.workspace, self.home)
            step = _pull(place, self.order.stage)
            self.runner = Runner(place, at_once=1, show=self.show, held=[lock])
            if self.stopped.is_set():  # after self.runner is set: `stop` may have run before
                raise Stopped("stopped")
            result = self.runner.run_stage(step)
            _push(place, self.order.stage)
            stages = parse_yaml_for_update((place / LOCK).read_text(), LOCK)["stages"]
            entry = dumps_yaml({self.order.stage: stages[self.order.stage]})
            _clear(place)
        return Answer(host=platform.node(), outcome=str(result.outcome), entry=entry)

    def stop(self) -> None:
        """Stops the stage and waits until all its processes have exited."""
        self.stopped.set()
        if self.runner:
            self.runner.stop()


def repository_of(workspace: Path) -> str:
    """Returns GRPO_REPOSITORY, or the URL of the workspace's remote `origin`.

    Raises:
      ParameterError: If there is no URL, or it holds a password, which git's command line exposes.
    """
    address = os.environ.get(REPOSITORY) or git(workspace, "remote", "get-url", "origin")
    if not address:
        raise ParameterError(f"{REPOSITORY}: must be a URL from which git can fetch commits")
    if CREDENTIALS.search(address) and not SSH_USER.match(address):
        raise ParameterError(
            f"{REPOSITORY}: must hold no password, got {address}; use an SSH key or a credential "
            "helper of git"
        )
    return address


def home_of(workspace: Path) -> Path:
    """Returns GRPO_WORKER_HOME, by default a directory in the workspace."""
    return Path(os.environ.get(HOME) or workspace / ".work" / "worker")


@contextmanager
def _free_place(home: Path) -> Iterator[tuple[Path, int]]:
    """Yields the first directory that no other run uses, and the descriptor of its lock.

    Directories are numbered and reused: with --limit 1 a killed stage finds its checkpoint again.

    Raises:
      ArtifactError: If the directory exists and was not created by a worker.
    """
    for number in itertools.count():
        place = home / str(number)
        mark, lock = place / PLACE, place / STAGES_LOCK
        is_foreign = place.exists() and any(each.name != KEPT for each in place.iterdir())
        if is_foreign and not mark.exists():
            raise ArtifactError(
                f"{place}: must be free or created by a worker; move it, or set {HOME} to a "
                "directory that only workers use"
            )
        lock.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield place, file.fileno()
            return


def _clear(place: Path) -> None:
    for each in place.iterdir():
        if each.name != KEPT:
            remove(each)


def _check_out(place: Path, repository: str, commit: str) -> None:
    """Checks out a commit; keeps the checkpoints of earlier runs."""
    _clear(place)
    _git(place, "init", "--quiet")
    said = _git(place, "fetch", "--quiet", "--depth", "1", "--", repository, commit)
    said = said or _git(place, "checkout", "--quiet", "--detach", "FETCH_HEAD")
    if NOT_THERE in said:
        raise ParameterError(f"{repository}: has no commit {commit}; git push it there")
    if said:
        raise ArtifactError(f"{repository}: cannot check out {commit}, {brief(said)}")


def _git(place: Path, *arguments: str) -> str:
    """Runs git; returns its error output if it fails, else ""."""
    command = ["git", "-C", str(place), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stderr or f"exit code {done.returncode}" if done.returncode else ""


def _require_same_setup(place: Path) -> None:
    """Raises ArtifactError if this Python was set up from another requirements.lock."""
    own, wanted = Path(sys.prefix).parent / SETUP, place / SETUP
    if own.is_file() and wanted.is_file() and own.read_bytes() != wanted.read_bytes():
        raise ArtifactError(
            f"{own}: must be that of the commit, otherwise results may differ; check out the "
            "commit, run make setup there, then restart the worker"
        )


def _set_up_dvc(place: Path, workspace: Path, home: Path) -> None:
    """Configures DVC in a clone with the host's local settings and cache."""
    (place / ".dvc" / "config.local").touch(mode=0o600)  # may hold keys of the remote
    with Config(str(place / ".dvc")).edit("local") as settings:
        merge(settings, Config(str(workspace / ".dvc")).load_one("local"))
        settings["cache"]["dir"] = str(home / "cache")
        settings["core"]["site_cache_dir"] = str(place / ".dvc" / "tmp")  # removed with the clone


def _pull(place: Path, name: str) -> Step:
    """Pulls only the data that the stage reads; returns the stage."""
    with Repo(str(place), _wait_for_lock=True) as repo:
        stage = _stage(repo, name)
        read = [dep.fs_path for dep in stage.deps]
        _pull_overlapping(repo, repo.index.graph.successors(stage), read)
        manifests = [Path(each) for each in read if Path(each).parent == place / MANIFESTS]
        named = [str(place / file) for each in manifests for file in read_json(each)]
        _pull_overlapping(repo, repo.index.graph, named)
        hints = replace(hints_of(stage), retries=0)  # the orchestrator retries
    return Step(name=name, upstream=(), hints=hints, is_changed=True)


def _pull_overlapping(repo: Repo, makers: Iterable[Stage], read: Sequence[str]) -> None:
    """Pulls those outs of the given stages that overlap the paths `read`."""
    outs = [out.fs_path for each in makers for out in each.outs]
    wanted = [out for out in outs if any(overlap(out, each) for each in read)]
    if wanted:
        with reached():
            repo.pull(wanted)


def _push(place: Path, name: str) -> None:
    with Repo(str(place), _wait_for_lock=True) as repo:
        outs = [out.fs_path for out in _stage(repo, name).outs]
        with reached():
            repo.push(outs)


def _stage(repo: Repo, name: str) -> Stage:
    try:
        stages = list(repo.index.graph)
    except DvcException as error:
        raise ParameterError(f"dvc.yaml: {explain(error)}") from None
    for stage in stages:
        if getattr(stage, "name", None) == name:
            return stage
    raise ParameterError(f"dvc.yaml: has no stage {name}")
