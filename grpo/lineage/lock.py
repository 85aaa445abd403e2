"""dvc.lock as data: command, inputs and outputs of every stage, and the producer of a path."""

import configparser
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import ArtifactError, brief
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import require_inside, require_plain, write_bytes
from grpo.schema import PARAMS

LOCK = "dvc.lock"
PIPELINE = "dvc.yaml"
DIGEST_CHARACTERS = 36  # MLflow's limit; an md5 and ".dir" fit exactly
MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")  # a content hash in DVC's cache
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A path and its content hash: DVC's md5, with the suffix `.dir` for a directory."""

    path: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """The entry of one executed stage in dvc.lock.

    Instance::

        StageEntry(name="score@sgpo-1", command="python -m stages.score ...",
                   deps=(Artifact(path="artifacts/prompts/train.parquet", digest="9e1..."),),
                   outs=(Artifact(path="artifacts/rewards/sgpo-1.parquet", digest="07c..."),),
                   values={"reward": {"judge": "math"}}, block="  score@sgpo-1:\n    cmd: ...")
    """

    name: str
    command: str
    deps: tuple[Artifact, ...]
    outs: tuple[Artifact, ...]
    values: Mapping[str, Any]  # parameters, by their path in dvc.yaml
    block: str  # the entry's lines in dvc.lock

    @property
    def params(self) -> dict[str, Any]:
        """The leaves of the parameters, e.g. arms.sgpo.objective.0.rloo.low."""
        leaves: dict[str, Any] = {}
        for path, value in self.values.items():
            leaves |= flatten(value, path)
        return leaves

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the entry; runs with equal inputs and outputs have the same hash."""
        return hashlib.sha256(self.block.encode()).hexdigest()


Lock = Mapping[str, StageEntry]


def read_lock(workspace: Path) -> Lock:
    """Returns the executed stages by name, except those that dvc.yaml no longer declares.

    Raises:
      ArtifactError: If dvc.lock is missing or is not a lock file of DVC.
    """
    path = workspace / LOCK
    for each in (path, workspace / PIPELINE):
        require_plain(each)
    try:
        text = path.read_text(encoding="utf-8")
        stages = (parse_yaml(text) or {}).get("stages") or {}
        blocks = dict(_blocks(text))
        declared = _declared(workspace)
        return {
            name: _entry(name, each, blocks[name])
            for name, each in stages.items()
            if declared is None or name.split("@")[0] in declared
        }
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run dvc repro first") from None
    except (ArtifactError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(f"{path}: must be a lock file of DVC, {reason}") from None


def sort_lock(workspace: Path) -> None:
    """Sorts the entries of dvc.lock as in dvc.yaml; DVC appends them in the order of completion.

    The lines of an entry do not change. A file that DVC did not write is left as it is. No stage
    may finish during the call.
    """
    path = workspace / LOCK
    text = _read_if_there(path)
    try:
        blocks = dict(_blocks(text))
    except ArtifactError:
        return
    head = text[: text.find(next(iter(blocks.values()), ""))]
    known = {name: position for position, name in enumerate(_declared_stages(workspace))}
    order = sorted(blocks, key=lambda name: (known.get(name, len(known)), name))
    is_whole = text == "\n".join([head.removesuffix("\n"), *blocks.values(), ""])
    if is_whole and order != list(blocks):
        lines = [head.removesuffix("\n"), *(blocks[name] for name in order), ""]
        write_bytes(path, "\n".join(lines).encode())


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts and lists by their dotted path."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for key, item in items:
        leaves |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def outs_behind(lock: Lock, path: str) -> list[tuple[StageEntry, Artifact]]:
    """Returns the outs that equal, contain or lie in `path`, with the stages that wrote them."""
    return [
        (entry, out) for entry in lock.values() for out in entry.outs if overlap(out.path, path)
    ]


def overlap(one: str, other: str) -> bool:
    return one == other or is_inside(one, other) or is_inside(other, one)


def is_inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def is_read_as_written(workspace: Path, dep: Artifact, outs: list[Artifact]) -> bool:
    """Returns whether the digest of `dep`, as a stage read it, matches the current `outs`.

    A directory that contains outs matches if it contained no other files.
    """
    return digest_as_written(workspace, dep.path, outs) == dep.digest


def digest_as_written(
    workspace: Path, path: str, outs: Sequence[Artifact], beside: Mapping[str, str] | None = None
) -> str | None:
    """Returns DVC's digest of `path`, computed from the overlapping outs; None if unknown.

    Directory listings come from DVC's cache. Without them only the digest of a path that is itself
    an out is known.

    Args:
      beside: md5 by path of the files in `path` that belong to no out.
    """
    if len(outs) == 1 and outs[0].path == path:
        return outs[0].digest
    files = dict(beside or {})
    for out in outs:
        listed = read_listing(workspace, out.digest)
        if listed is None:
            return None
        files |= {f"{out.path}/{name}" if name else out.path: md5 for name, md5 in listed.items()}
    inside = {name: md5 for name, md5 in files.items() if is_inside(name, path)}
    return files.get(path) or (directory_digest(inside, path) if inside else None)


def directory_digest(files: Mapping[str, str], directory: str) -> str:
    """Returns DVC's digest of a directory, computed from the md5 of its files."""
    start = len(directory.rstrip("/")) + 1
    listing = [{"md5": files[name], "relpath": name[start:]} for name in sorted(files)]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def read_listing(workspace: Path, digest: str) -> dict[str, str] | None:
    """Returns md5 by file name for a cached directory, {"": md5} for a file, None if not cached.

    Raises:
      ArtifactError: If the content is not a listing, or a name leads outside the directory.
    """
    if not digest.endswith(".dir"):
        return {"": digest}
    cached = cached_path(workspace, digest)
    if not cached.is_file():
        return None
    try:
        listing = json.loads(cached.read_text(encoding="utf-8"))
        return {require_inside(each["relpath"]): str(each["md5"]) for each in listing}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{cached}: must be a listing of DVC, {brief(error)}; delete it, then dvc fetch"
        ) from None


def cached_path(workspace: Path, digest: str) -> Path:
    """Returns the path of a content in DVC's cache.

    Raises:
      ArtifactError: If `digest` is not an md5: it could be a path that leads elsewhere.
    """
    if not MD5.fullmatch(digest):
        raise ArtifactError(f"{digest!r}: must be an md5 of DVC; run dvc push where it was made")
    return _cache_directory(workspace) / "files" / "md5" / digest[:2] / digest[2:]


def file_digest(path: Path) -> str:
    """Returns DVC's digest of a file: its md5."""
    total = hashlib.md5()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def _declared(workspace: Path) -> set[str] | None:
    """Returns the stage names in dvc.yaml without the part after @; None without a dvc.yaml."""
    path = workspace / PIPELINE
    if not path.exists():
        return None
    return set((parse_yaml(_read_if_there(path)) or {}).get("stages") or {})


def _read_if_there(path: Path) -> str:
    """Returns a file's text, or "" if it does not exist; rejects pipes, which would block."""
    require_plain(path)
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _declared_stages(workspace: Path) -> Iterator[str]:
    """Yields the stages of dvc.yaml in file order; expands a foreach in its parameter's order."""
    pipeline, params = (
        parse_yaml(_read_if_there(path)) for path in (workspace / PIPELINE, workspace / PARAMS)
    )
    for name, stage in ((pipeline or {}).get("stages") or {}).items():
        if "foreach" not in stage:
            yield name
            continue
        keys = stage["foreach"]
        if isinstance(keys, str):
            keys = params
            for part in stage["foreach"].removeprefix("${").removesuffix("}").split("."):
                keys = keys.get(part, {}) if isinstance(keys, dict) else {}
        yield from (f"{name}@{key}" for key in keys)


def _entry(name: str, content: dict[str, Any], block: str) -> StageEntry:
    command = content["cmd"]
    values: dict[str, Any] = {}
    for each in (content.get("params") or {}).values():
        values |= each
    return StageEntry(
        name=name,
        command=command if isinstance(command, str) else " && ".join(command),
        deps=tuple(_artifacts(content.get("deps") or [])),
        outs=tuple(_artifacts(content.get("outs") or [])),
        values=values,
        block=block,
    )


def _artifacts(items: list[dict[str, Any]]) -> Iterator[Artifact]:
    for item in items:
        known = (item.get(kind) for kind in ("md5", "etag", "checksum", "version_id"))
        digest = next((str(each) for each in known if each), "unknown")
        yield Artifact(path=item["path"], digest=digest[:DIGEST_CHARACTERS])


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields each stage's name and lines; DVC indents names by two spaces."""
    name, lines = "", list[str]()
    for line in text.splitlines():
        if not line.startswith("   "):
            if name:
                yield name, "\n".join(lines)
            is_name = line.startswith("  ")
            name = str(parse_yaml(line.strip().removesuffix(":"))) if is_name else ""
            lines = []
        if name:
            lines.append(line)
    if name:
        yield name, "\n".join(lines)


def _cache_directory(workspace: Path) -> Path:
    """Returns DVC's cache directory: `cache.dir` in the repository's settings, or the default."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read([workspace / ".dvc" / "config", workspace / ".dvc" / "config.local"])
    chosen = settings.get("cache", "dir", fallback="cache").strip("'\"")
    return workspace / ".dvc" / chosen
