"""Traces an artifact back to its prompts, code revision and parameters; formats it as text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from grpo.errors import ArtifactError
from grpo.lineage.lock import (
    LOCK,
    Artifact,
    Lock,
    StageEntry,
    is_inside,
    is_read_as_written,
    outs_behind,
    read_lock,
)
from grpo.lineage.revision import Revision, revisions

NODE_CHARACTERS = 8  # of a digest; enough to tell versions apart on a screen


@dataclass(frozen=True, kw_only=True)
class Node:
    """An artifact, the stage that wrote it, and its inputs; a source has no stage and no inputs."""

    artifact: Artifact
    stage: StageEntry | None
    revision: Revision | None
    inputs: tuple["Node", ...]
    outdated: tuple[str, ...]  # inputs that have changed since the stage read them

    def walk(self) -> Iterator["Node"]:
        """Yields every node once, this one first."""
        seen: set[str] = set()
        waiting = [self]
        while waiting:
            node = waiting.pop(0)
            if node.artifact.path not in seen:
                seen.add(node.artifact.path)
                yield node
                waiting.extend(node.inputs)


def trace(path: Path, workspace: Path = Path()) -> Node:
    """Returns the lineage graph of an artifact, or of a file in an artifact's directory.

    Raises:
      ArtifactError: If no stage in dvc.lock wrote `path`.
    """
    lock = read_lock(workspace)
    name = _name_in(workspace, path)
    found = [
        (entry, out) for entry, out in outs_behind(lock, name) if not is_inside(out.path, name)
    ]
    if not found:
        raise ArtifactError(f"{name}: no stage in {LOCK} wrote it; {_suggest(lock, name)}")
    entry, out = found[0]
    if out.path != name and (workspace / out.path).exists() and not (workspace / name).exists():
        raise ArtifactError(f"{name}: no such file in {out.path}, which {entry.name} wrote")
    return _Tracer(workspace, lock).node(out, entry)


def format_tree(root: Node) -> str:
    """Returns the graph as an indented tree, followed by code revisions, sources and parameters."""
    lines = list(_tree(root, prefix="", joint="", seen=set()))
    lines += ["", "code"]
    made = _stages(root)
    for revision in sorted({str(each) for _, each in made}):
        names = [entry.name for entry, each in made if str(each) == revision]
        lines.append(f"  revision {revision}: {', '.join(sorted(names))}")
    lines += [
        f"  {each.artifact.path}  {_short(each.artifact)}"
        for each in sorted(root.walk(), key=lambda node: node.artifact.path)
        if each.stage is None
    ]
    return "\n".join([*lines, "", "parameters", *_parameters([entry for entry, _ in made])])


class _Tracer:
    """Builds one node per out, shared by all its consumers."""

    def __init__(self, workspace: Path, lock: Lock) -> None:
        self.workspace = workspace
        self.lock = lock
        self.revisions = revisions(workspace, lock)
        self.nodes: dict[str, Node] = {}

    def node(self, artifact: Artifact, entry: StageEntry) -> Node:
        if artifact.path not in self.nodes:
            inputs: dict[str, Node] = {}
            outdated = []
            for dep in entry.deps:
                behind = outs_behind(self.lock, dep.path)
                inputs |= {out.path: self.node(out, maker) for maker, out in behind}
                if not behind:
                    inputs[dep.path] = self._source(dep)
                elif not is_read_as_written(self.workspace, dep, [out for _, out in behind]):
                    outdated.append(dep.path)
            self.nodes[artifact.path] = Node(
                artifact=artifact,
                stage=entry,
                revision=self.revisions[entry.name],
                inputs=tuple(inputs.values()),
                outdated=tuple(outdated),
            )
        return self.nodes[artifact.path]

    def _source(self, artifact: Artifact) -> Node:
        return Node(artifact=artifact, stage=None, revision=None, inputs=(), outdated=())


def _name_in(workspace: Path, path: Path) -> str:
    """Returns `path` as dvc.lock spells it: relative to the workspace, with slashes."""
    root = workspace.resolve()
    # Only the parent is resolved: an out may itself be a link into DVC's cache.
    is_named = path.name not in ("", "..")
    absolute = (root / path).parent.resolve() / path.name if is_named else (root / path).resolve()
    if not absolute.is_relative_to(root):
        raise ArtifactError(f"{path}: must lie in the workspace {root}")
    return str(PurePosixPath(absolute.relative_to(root)))


def _suggest(lock: Lock, name: str) -> str:
    """Returns a hint for an error: the outs in or next to `name`."""
    outs = sorted(out.path for entry in lock.values() for out in entry.outs)
    parent = str(PurePosixPath(name).parent)
    near = [out for out in outs if is_inside(out, name)] or [
        out for out in outs if is_inside(out, parent)
    ]
    return f"try {', '.join(near[:4])}" if near else f"{LOCK} lists what can be traced"


def _tree(node: Node, *, prefix: str, joint: str, seen: set[str]) -> Iterator[str]:
    """Yields a node's line and its inputs' lines; expands a repeated node only once."""
    path = node.artifact.path
    stage = f"  <- {node.stage.name}" if node.stage else ""
    repeated = path in seen and bool(_made(node))
    seen.add(path)
    yield f"{prefix}{joint}{path}  {_short(node.artifact)}{stage}{'  (above)' if repeated else ''}"
    below = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[joint]
    for old in node.outdated:
        yield f"{below}!  {old} has changed since {node.stage.name if node.stage else path} read it"
    inputs = [] if repeated else _made(node)
    for each in inputs:
        last = each is inputs[-1]
        yield from _tree(each, prefix=below, joint="└─ " if last else "├─ ", seen=seen)


def _made(node: Node) -> list[Node]:
    """Returns the inputs that a stage wrote, without sources."""
    return [each for each in node.inputs if each.stage]


def _stages(root: Node) -> list[tuple[StageEntry, Revision | None]]:
    """Returns the distinct stages in the graph of `root`."""
    found = {node.stage.name: (node.stage, node.revision) for node in root.walk() if node.stage}
    return list(found.values())


def _parameters(stages: list[StageEntry]) -> list[str]:
    """Returns `path = value` lines; names the stages if their values differ."""
    users: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        for name, value in stage.params.items():
            users.setdefault((name, json.dumps(value)), []).append(stage.name)
    names = [name for name, _ in users]
    return [
        f"  {name} = {value}" + (f"  ({', '.join(sorted(those))})" if names.count(name) > 1 else "")
        for (name, value), those in sorted(users.items())
    ]


def _short(artifact: Artifact) -> str:
    return artifact.digest[:NODE_CHARACTERS]
