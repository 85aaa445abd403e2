"""Atomic, byte-reproducible file output, input checks, file locks, and scratch for resuming."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from grpo.errors import ArtifactError, BusyError
from grpo.runtime.plugins import PLUGINS

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
MISUSED = (
    errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY,
    errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV,
)  # fmt: skip
HASHES = Path(".work/hashes")  # cache of large files' hashes, by name and inode
LARGE_BYTES = 2**26
HASHED_AT_ONCE = SYNCED_AT_ONCE = 8
TICK_SECONDS = 2.0  # resolution of the coarsest file system clock
ENDING_SECONDS = 1.0  # the forks of a killed process have ended by then
# Suffixes of the files that a killed writer leaves next to `NAME`: .NAME.PID.grpo-tmp or
# .NAME.PID.grpo-old. Only this module writes such names; .dvcignore lists them.
TEMPORARY, ASIDE = "grpo-tmp", "grpo-old"
SEAL_FILE = "made-by-grpo.json"  # SHA-256 by name of the other files in its directory
SEAL_COMMENT = b"<!-- made by grpo, SHA-256 of the above: "
RUNS_CODE = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py")
WORK = Path(".work")
ADDRESSES = WORK / "ui.json"  # of the pages of Prefect and MLflow; flows/ui.py writes it
# The code on which a stage's output may depend.
CODE = (Path("grpo"), Path("stages"), PLUGINS)
_held: set[IO[str]] = set()  # files that `exclusive` has locked


@contextmanager
def atomic_path(path: Path, *, hashes: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling of `path`; fsyncs it and moves it to `path` if the block succeeds.

    Works for files and directories. A killed writer leaves either the old or the new content, and
    possibly a temporary sibling that the next writer removes. Within a directory that is itself
    being written by this function, nothing is fsynced: that is done once, for the directory.

    Args:
      hashes: Whether to hash large files while others are fsynced, so that `known_sha256` need not
        read them. Those of the last TICK_SECONDS are left out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{os.getpid()}.{TEMPORARY}"
    is_within_another = any(part.endswith(mark) for part in path.parts[:-1])
    with temporary_beside(path) as temporary:
        try:
            yield temporary
            if is_within_another:
                _replace(temporary, path)
            else:
                replace_whole(temporary, path, then=_remember if hashes else None)
        except OSError as error:
            if error.errno in NO_ROOM:
                error.filename = str(path)  # libraries name no file or the temporary one
            raise


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `path`, removed afterwards; removes those of killed writers."""
    remove_left_beside(path)
    temporary = _beside(path, TEMPORARY)
    try:
        yield temporary
    finally:
        _discard(temporary)


def replace_whole(
    source: Path, target: Path, *, then: Callable[[Path], object] | None = None
) -> None:
    """Fsyncs a file or directory and moves it over another; a kill leaves the old or the new.

    A journaling file system commits together what is fsynced at the same time.

    Args:
      then: Called with each file that is fsynced, while others are.
    """

    def sync(file: Path) -> None:
        _sync(file)
        if then is not None:
            then(file)

    found = source.rglob("*") if source.is_dir() else [source]
    with ThreadPoolExecutor(SYNCED_AT_ONCE) as threads:
        list(threads.map(sync, (each for each in found if each.is_file())))
    _replace(source, target)
    _sync(target.parent)


@contextmanager
def refused_by_the_system() -> Iterator[None]:
    """Converts OSErrors about full disks, permissions and wrong paths to one-line errors.

    Raises:
      ArtifactError: In place of such an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            advice = "make room"
        elif error.errno in CLOSED:
            advice = "permit reading and writing"
        elif error.errno in MISUSED and error.filename:
            advice = "put there what is expected, or correct the path"
        else:
            raise
        where, reason = error.filename or "the workspace", os.strerror(error.errno)
        raise ArtifactError(f"{where}: {reason}; {advice}, then rerun") from None


def require_plain(path: Path) -> None:
    """Requires a file, a directory or nothing: reading a named pipe, for example, may hang.

    Raises:
      ArtifactError: If `path` is of another type.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ArtifactError(
            f"{path}: must be a file or a directory, is a pipe, a socket or a device; correct the "
            "path"
        )


@contextmanager
def named_output(path: Path) -> Iterator[Path]:
    """Yields a temporary path for an output that a user requested at `path`, and seals it.

    The seal holds the hashes of all files: `SEAL_FILE` in a directory, a comment at the end of an
    SVG. The next call replaces only an unchanged sealed output.

    Raises:
      ArtifactError: As `require_replaceable` does.
    """
    require_replaceable(path)
    with atomic_path(path.resolve()) as temporary:
        yield temporary
        if temporary.is_dir():
            write_json(temporary / SEAL_FILE, _hashes(temporary))
        else:
            content = temporary.read_bytes()
            temporary.write_bytes(content + _comment(content))


def require_replaceable(path: Path) -> None:
    """Requires `path` to be free or an unchanged output of `named_output`.

    Raises:
      ArtifactError: If `path` is another file or non-empty directory, or was changed.
    """
    if path.is_dir():
        is_ours = not any(path.iterdir()) or _is_sealed(path)
    elif path.is_file():
        content, _, _ = path.read_bytes().rpartition(SEAL_COMMENT)
        is_ours = path.read_bytes() == content + _comment(content)
    else:
        is_ours = not path.exists()
    if not is_ours:
        raise ArtifactError(
            f"{path}: must be free or an unchanged output of this command; choose another path "
            "or delete it"
        )


def _is_sealed(directory: Path) -> bool:
    seal = directory / SEAL_FILE
    if not seal.is_file() or any(each.is_symlink() for each in directory.rglob("*")):
        return False
    hashes = _hashes(directory)
    return seal.read_bytes() == canonical_json(hashes)


def _hashes(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory, and "" for other entries."""
    return {
        each.relative_to(directory).as_posix(): sha256_of(each) if each.is_file() else ""
        for each in directory.rglob("*")
        if each != directory / SEAL_FILE
    }


def _comment(content: bytes) -> bytes:
    return SEAL_COMMENT + hashlib.sha256(content).hexdigest().encode() + b" -->\n"


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Writes canonical JSON."""
    write_bytes(path, canonical_json(value))


def canonical_json(value: Any) -> bytes:
    """Returns JSON with sorted keys and an indent of two spaces; rejects NaN."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      ArtifactError: If the file is missing or not valid JSON.
    """
    require_plain(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it") from None
    except (ValueError, RecursionError) as error:  # wrong syntax, too many digits, too deep
        raise ArtifactError(f"{path}: must be JSON, {error}; delete it and rerun") from None


def require_inside(name: str) -> str:
    """Returns a file name; raises ValueError if it could lead outside its directory."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise ValueError(f"a file must lie inside its directory, got {name!r}")
    return name


def require_inert(directory: Path) -> None:
    """Raises ArtifactError if a policy's directory has a file that can execute code on load."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in RUNS_CODE:
            raise ArtifactError(
                f"{path}: may hold a pickle or code, which is executed on load; delete it"
            )


def remove(path: Path) -> None:
    """Removes a file or directory if it exists; a kill leaves all of it at `path` or nothing."""
    if path.is_dir() and not path.is_symlink():
        remove_left_beside(path)
        shutil.rmtree(_move_aside(path))
    else:
        path.unlink(missing_ok=True)


def digest(paths: Iterable[Path], value: Any = None) -> str:
    """Returns a SHA-256 over the names and contents of files (directories walked) and a value."""
    total = hashlib.sha256(json.dumps(value, sort_keys=True).encode())
    files = [each for path in paths for each in files_in(path)]
    for file, found in zip(files, _known_hashes(files)):
        total.update(str(file).encode())
        total.update(bytes.fromhex(found))
    return total.hexdigest()


def files_in(path: Path) -> Iterator[Path]:
    """Yields a file, or the files of a directory in the order of their paths, without bytecode."""
    if not path.is_dir():
        yield from [path] if path.is_file() else []
        return
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        if "__pycache__" not in folder.split(os.sep)
        for name in names
    ]
    for name in sorted(found, key=lambda each: each.split(os.sep)):  # as paths are sorted
        if os.path.isfile(name):
            yield Path(name)


def _known_hashes(files: Sequence[Path]) -> Iterator[str]:
    """Yields `known_sha256` of files; several large ones are hashed side by side."""
    # Each once: a base policy is evaluated as base and as policy.
    entries = {each: _entry(each) for each in files if each.stat().st_size >= LARGE_BYTES}
    if len(entries) > 1:
        large = {entry: each for each, entry in entries.items()}
        with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:
            hashes = dict(zip(large, threads.map(known_sha256, large.values())))
        yield from (hashes[entries[each]] if each in entries else sha256_of(each) for each in files)
    else:
        yield from map(known_sha256, files)


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def known_sha256(file: Path) -> str:
    """Returns a file's SHA-256, from the cache for a large file that has not changed.

    The cache compares the ctime, which changes with the content and cannot be set.
    """
    if file.stat().st_size < LARGE_BYTES:
        return sha256_of(file)
    version, entry = _version(file), _entry(file)
    if entry.exists():
        of, _, found = entry.read_text(encoding="utf-8").rpartition(" ")
        if of == version:
            return found
    is_settled = _is_settled(file)
    found = sha256_of(file)
    if is_settled and _version(file) == version:
        write_bytes(entry, f"{version} {found}".encode())
    return found


def _remember(file: Path) -> None:
    """Hashes a file if `known_sha256` may use the result later.

    Files with several names are left out: threads would write the same entry of the cache.
    """
    is_alone = not file.is_symlink() and file.stat().st_nlink == 1
    if is_alone and file.stat().st_size >= LARGE_BYTES and _is_settled(file):
        known_sha256(file)


def _is_settled(file: Path) -> bool:
    """Returns whether every later change of a file will change its ctime."""
    return time.time() - file.stat().st_ctime > TICK_SECONDS


def _entry(file: Path) -> Path:
    """Returns the path of a file's entry in the cache, which stays if its directory is moved."""
    key = f"{file.name} {file.stat().st_ino}"
    return HASHES / hashlib.sha256(key.encode()).hexdigest()


def _version(file: Path) -> str:
    about = file.stat()
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


@contextmanager
def exclusive(path: Path, holder: str) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel frees it when the process and its forks die.

    Raises:
      BusyError: If another process holds it for ENDING_SECONDS.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = time.monotonic() + ENDING_SECONDS
        while not _lock_at_once(file):
            if time.monotonic() > deadline:
                raise BusyError(f"{path}: {holder} is already running here; wait for it or stop it")
            time.sleep(0.02)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _lock_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def leave_locks() -> None:
    """Lets go, in a fork, of the locks that its parent holds: the fork may outlive the parent."""
    for file in _held:
        file.close()


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Waits for an advisory lock on `path`, then holds it; the kernel frees it on death.

    Args:
      kind: LOCK_SH can be held by several processes, and none of them holds LOCK_EX then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield


def host_lock(name: str, what: str) -> Path:
    """Returns the file with which a user's processes on this host lock a remote resource.

    Args:
      what: Identifies the resource; hashed because it may hold credentials.
    """
    known = hashlib.sha256(f"{what} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"grpo-{name}-{known}.lock"


def _replace(source: Path, target: Path) -> None:
    """Moves `source` over `target`; moves an existing directory aside first.

    Raises:
      ArtifactError: If exactly one of the two is a directory.
    """
    if target.exists() and target.is_dir() != source.is_dir():
        wanted = "a directory" if source.is_dir() else "a file"
        raise ArtifactError(f"{target}: must be {wanted} or free; move what is there, then rerun")
    if target.is_dir():
        aside = _move_aside(target)
        os.rename(source, target)
        shutil.rmtree(aside)
    else:
        os.replace(source, target)


def _move_aside(path: Path) -> Path:
    """Gives a directory the name of what the next writer removes, and returns it."""
    aside = _beside(path, ASIDE)
    _discard(aside)
    os.rename(path, aside)
    return aside


def _discard(path: Path) -> None:
    """Removes as much as possible; the next writer removes what Ray's processes still write."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    """Returns this process's temporary sibling of a path."""
    return path.parent / f".{path.name}.{os.getpid()}.{suffix}"


def _left_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the temporary siblings of a path and the process ids of their writers."""
    form = re.compile(rf"\.{re.escape(path.name)}\.([1-9][0-9]{{0,6}})\.({TEMPORARY}|{ASIDE})")
    for name in os.listdir(path.parent):
        if found := form.fullmatch(name):
            yield path.parent / name, int(found[1])


def remove_left_beside(path: Path) -> None:
    """Removes the temporary siblings of a path that no other process can still write."""
    for left, writer in _left_beside(path):
        if writer == os.getpid() or not _is_running(writer):
            _discard(left)


def _is_running(pid: int) -> bool:
    """Returns whether a process can still write; a zombie cannot."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False


def _sync(path: Path) -> None:
    """Flushes a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Scratch:
    """Checkpoints in `.work/STAGE/FINGERPRINT`, for one state of code, inputs and parameters."""

    def __init__(self, stage: str, fingerprint: str, *, part: str = "") -> None:
        self._stage = WORK / stage
        self.directory = self._stage / fingerprint[:32] / part

    def latest(self) -> tuple[int, Path] | None:
        """Returns the number and path of the newest checkpoint."""
        found = sorted(self.directory.glob("checkpoint-*"))
        return (int(found[-1].name.rpartition("-")[2]), found[-1]) if found else None

    def save(self, number: int, write: Callable[[Path], None]) -> None:
        """Writes checkpoint `number` atomically and removes the older ones."""
        older = list(self.directory.glob("checkpoint-*"))
        with atomic_path(self.directory / f"checkpoint-{number:08d}") as temporary:
            temporary.mkdir()
            write(temporary)
        for path in older:
            remove(path)

    def within(self, part: str) -> "Scratch":
        """Returns the scratch of one part of the stage; clearing either clears both."""
        return Scratch(self._stage.name, self.directory.name, part=part)

    def clear(self) -> None:
        """Removes all scratch of the stage, including that of other fingerprints."""
        remove(self._stage)
