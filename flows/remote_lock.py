"""dvc.lock of a pipeline whose data is in DVC's remote: finds stale stages, merges new entries.

A stage is up to date if its entry matches dvc.yaml, params.yaml, the files of the workspace and the
entries of its upstream stages. Local copies of outs are ignored. DVC's remote is read only for the
listings of directories that other stages read in part or combined. The same rule decides whether
an entry from a worker is merged.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx
from dvc.dependency import ParamsDependency
from dvc.exceptions import DvcException
from dvc.output import Output
from dvc.repo import Repo
from dvc.schema import COMPILED_LOCK_FILE_STAGE_SCHEMA
from dvc.stage import Stage
from dvc.utils.serialize import dumps_yaml, parse_yaml_for_update
from dvc.utils.strictyaml import validate
from dvc_data.hashfile.hash_info import HashInfo

from flows.planning import explain, plan
from flows.remote_data import reached
from flows.runner import StageError
from flows.wire import Order
from grpo.errors import ParameterError, brief
from grpo.lineage.lock import (
    LOCK,
    MD5,
    Artifact,
    cached_path,
    digest_as_written,
    file_digest,
    is_inside,
    overlap,
)
from grpo.lineage.revision import git
from grpo.runtime.artifacts.files import require_plain, write_bytes

UNKNOWN = "what has not run yet"


@dataclass(frozen=True, kw_only=True)
class Dep:
    """An input of a stage: committed files, outs, or a directory with both."""

    path: str
    digest: str = UNKNOWN  # if it contains no outs
    outs: tuple[str, ...] = ()  # outs that equal, contain or lie in `path`
    beside: Mapping[str, str] = field(default_factory=dict)  # md5 of its files that are not outs


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A stage as declared in the commit."""

    facts: Mapping[str, Any]  # command, outs and parameters of its entry; no deps
    deps: tuple[Dep, ...]
    upstream: tuple[str, ...]
    is_always_due: bool


class RemoteLock:
    """dvc.lock and the stages of the pipeline in the working directory.

    Args:
      targets: As for `plan`.

    Raises:
      ParameterError: If the git repository or the pipeline does not allow remote stages.
    """

    def __init__(self, workspace: Path, targets: Sequence[str] = ()) -> None:
        self.workspace = workspace
        self.commit = committed(workspace)
        self.guard = threading.RLock()
        self.content = _read(workspace / LOCK)
        self.digests: dict[str, str] = {}  # of outs, by path
        self.declared: dict[str, Declared] = {}
        steps = plan(targets, changed=self._read_stages)
        # A stage without outs has only local effects, so workers do not run it.
        silent = {name for name, each in self.declared.items() if not each.facts["outs"]}
        self.steps = tuple(step for step in steps if step.name not in silent)
        self.left = tuple(step.name for step in steps if step.name in silent)

    def is_fresh(self, name: str) -> bool:
        with self.guard:
            entry = self.content["stages"].get(name)
            known = self.declared.get(name)
            if known is None:  # a .dvc file: data under version control
                return True
            return not known.is_always_due and not (entry is None or self._difference(name, entry))

    def order(self, name: str) -> Order:
        """Returns the order with which a worker runs the stage.

        Raises:
          ParameterError: If the order exceeds Prefect's size limit.
        """
        with self.guard:
            stages = self.content["stages"]
            makers = [each for each in self.declared[name].upstream if each in stages]
            entries = {each: {key: stages[each][key] for key in ("cmd", "outs")} for each in makers}
            return Order(commit=self.commit, stage=name, entries=entries)

    def merge(self, name: str, text: str) -> None:
        """Merges a worker's entry, as YAML, into dvc.lock.

        Raises:
          StageError: If a run of this commit on this data cannot have written the entry.
        """
        with self.guard:
            try:
                entry = parse_yaml_for_update(text, LOCK)[name]
                validate(entry, COMPILED_LOCK_FILE_STAGE_SCHEMA, path=name)
                difference = self._difference(name, entry)
            except (DvcException, KeyError, TypeError) as error:
                difference = f"must be an entry of {LOCK}, {brief(explain(error))}"
            if difference:
                raise StageError(
                    f"{name}: the worker's entry is refused, {difference}; check that the worker "
                    "has this commit and this data",
                    code=1,
                )
            self.content["stages"][name] = entry
            write_bytes(self.workspace / LOCK, dumps_yaml(self.content).encode())
            self._learn(name)

    def _read_stages(self, repo: Repo) -> set[str]:
        """Reads the stages of the workspace; returns the names of stale stages."""
        if not repo.config["core"].get("remote"):
            raise ParameterError(
                ".dvc/config: must name a remote that all workers reach; "
                "dvc remote add -d NAME URL, then commit it"
            )
        graph, hashes = repo.index.graph, dict[str, str]()
        for stage in graph:
            if stage.cmd and not stage.frozen:
                self.declared[stage.addressing] = _declared(repo, graph, stage, hashes)
                self._learn(stage.addressing)
            else:
                self.digests |= {_path(repo, out): str(out.hash_info.value) for out in stage.outs}
        return {name for name in self.declared if not self.is_fresh(name)}

    def _learn(self, name: str) -> None:
        outs = self.content["stages"].get(name, {}).get("outs", [])
        self.digests |= {out["path"]: str(out.get("md5")) for out in outs}

    def _difference(self, name: str, entry: Mapping[str, Any]) -> str | None:
        """Returns how an entry differs from a new run's entry, ignoring hashes of outs, or None."""
        known = self.declared[name]
        wanted = {**known.facts, **{f"dep {dep.path}": self._digest(dep) for dep in known.deps}}
        given = _facts_of(entry)
        for what in (*wanted, *given):
            if wanted.get(what) != given.get(what):
                values = brief(wanted.get(what)), brief(given.get(what))
                return "{} must be {}, got {}".format(what, *values)
        unhashed = [out for out in entry.get("outs", []) if not MD5.fullmatch(out.get("md5", ""))]
        return f"outs must have an md5, got {brief(unhashed)}" if unhashed else None

    def _digest(self, dep: Dep) -> str:
        """Returns the current digest of a dependency."""
        if not dep.outs:
            return dep.digest
        if not set(dep.outs) <= set(self.digests):
            return UNKNOWN
        outs = [Artifact(path=path, digest=self.digests[path]) for path in dep.outs]
        if [out.path for out in outs] != [dep.path]:
            self._fetch_listings([out.digest for out in outs])
        return digest_as_written(self.workspace, dep.path, outs, dep.beside) or UNKNOWN

    def _fetch_listings(self, digests: list[str]) -> None:
        """Pulls directory listings (names and hashes of files, no data) into DVC's cache."""
        wanted = [HashInfo("md5", digest) for digest in digests if digest.endswith(".dir")]
        missing = [each for each in wanted if not cached_path(self.workspace, each.value).is_file()]
        if missing:
            with Repo(str(self.workspace), _wait_for_lock=True) as repo, reached():
                repo.cloud.pull(missing)


def committed(workspace: Path) -> str:
    """Returns the workspace's commit.

    Raises:
      ParameterError: If there is no commit, or a file other than dvc.lock differs from it.
    """
    commit = git(workspace, "rev-parse", "HEAD")
    if not commit:
        raise ParameterError(f"{workspace}: must be a git repository with a commit")
    own = [f":(exclude){LOCK}", f":(exclude).{LOCK}.*"]
    changed = git(workspace, "status", "--porcelain", "--", ".", *own).splitlines()
    if changed:
        raise ParameterError(
            f"{changed[0][3:]}: must be as in the commit, which is all that workers see; commit "
            f"and push ({len(changed)} changed files, see git status)"
        )
    return commit


def _read(path: Path) -> Any:
    """Returns a lock file, or an empty one."""
    require_plain(path)
    try:
        content = parse_yaml_for_update(path.read_text() if path.exists() else "", str(path))
        content.setdefault("schema", "2.0")
        content.setdefault("stages", {})
    except (DvcException, AttributeError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: must be a lock file of DVC, {brief(error)}") from None
    return content


def _declared(
    repo: Repo, graph: "nx.DiGraph[Stage]", stage: Stage, hashes: dict[str, str]
) -> Declared:
    """Returns a stage as declared in the workspace.

    Args:
      hashes: Cache of file hashes, shared between stages; updated.
    """
    where = f"dvc.yaml: {stage.addressing}"
    if not Path(repo.root_dir) == Path(stage.wdir) == Path(stage.path).parent:
        raise ParameterError(f"{where}: must be in the repository's root, without wdir")
    kept = [out.def_path for out in stage.outs if not (out.use_cache and out.can_push)]
    if kept:
        raise ParameterError(f"{where}: out {kept[0]} must be cached and pushed (cache, push)")
    outs = [_path(repo, out) for each in graph.successors(stage) for out in each.outs]
    facts = {"cmd": stage.cmd, "outs": sorted(out.def_path for out in stage.outs)}
    deps = list[Dep]()
    for dep in stage.deps:
        if isinstance(dep, ParamsDependency):
            values = dep.get_hash().value or {}
            facts |= {f"param {dep.def_path}:{name}": value for name, value in values.items()}
        else:
            deps.append(_dep(repo, dep, outs, hashes))
    return Declared(
        facts=facts,
        deps=tuple(deps),
        upstream=tuple(sorted(each.addressing for each in graph.successors(stage))),
        is_always_due=stage.always_changed,
    )


def _dep(repo: Repo, dep: Output, outs: list[str], hashes: dict[str, str]) -> Dep:
    path = dep.def_path
    own = [each for each in outs if overlap(path, each)]
    if own:
        beside = _files_beside(repo, path, own) if path not in own else {}
        return Dep(path=path, outs=tuple(own), beside=beside)
    if path not in hashes:
        if not dep.exists:
            raise ParameterError(f"dvc.yaml: {dep.stage.addressing}: {path} must exist")
        hashes[path] = str(dep.get_hash().value)
    return Dep(path=path, digest=hashes[path])


def _files_beside(repo: Repo, directory: str, outs: list[str]) -> dict[str, str]:
    """Returns md5 by path for the directory's files that belong to no out."""
    found = (Path(each) for each in repo.dvcignore.find(repo.fs, str(Path(directory).absolute())))
    by_path = {each.relative_to(repo.root_dir).as_posix(): each for each in found}
    return {
        path: file_digest(file)
        for path, file in by_path.items()
        if not any(path == out or is_inside(path, out) for out in outs)
    }


def _facts_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an entry's facts and deps, in the format of `Declared.facts`."""
    params = entry.get("params", {}).items()
    return {
        "cmd": entry["cmd"],
        "outs": sorted(out["path"] for out in entry.get("outs", [])),
        **{f"param {file}:{name}": value for file, all_ in params for name, value in all_.items()},
        **{f"dep {dep['path']}": dep.get("md5") for dep in entry.get("deps", [])},
    }


def _path(repo: Repo, out: Output) -> str:
    return Path(out.fs_path).relative_to(repo.root_dir).as_posix()
