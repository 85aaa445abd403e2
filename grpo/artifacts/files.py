"""Atomic files and directories, safe names and contents, canonical JSON, hashes and locks."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from grpo.errors import ArtifactError, BusyError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HASHES = Path(".work/hashes")  # of large files, by name
LARGE_BYTES = 2**26
TICK_SECONDS = 2.0  # of the coarsest clock: a change within one would not show
RUNS_CODE = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `path` that replaces it, fsynced, when the block succeeds.

    Works for a file and for a directory: a killed writer leaves the old content or the new one,
    and a temporary sibling that the next writer removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        try:
            yield temporary
            replace_whole(temporary, path)
        except OSError as error:
            if error.errno in NO_ROOM:
                error.filename = str(path)  # some libraries name no file, others the temporary one
            raise


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yields a sibling of `path` that is removed, as are those that killed processes have left."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        if not _is_alive(left):
            _discard(left)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        yield temporary
    finally:
        _discard(temporary)


def replace_whole(source: Path, target: Path) -> None:
    """Moves a file or directory over another, fsynced: a kill leaves the old one or the new one."""
    for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if file.is_file():
            _sync(file)
    _replace(source, target)


@contextmanager
def refused_by_the_system() -> Iterator[None]:
    """Makes one line of a disk that is full, or a place that may not be written.

    Raises:
      ArtifactError: In place of such an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EROFS, errno.EACCES):
            raise
        where, reason = error.filename or "the workspace", os.strerror(error.errno)
        raise ArtifactError(f"{where}: {reason}; make room or permit writing, then rerun") from None


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Writes canonical JSON."""
    write_bytes(path, canonical_json(value))


def canonical_json(value: Any) -> bytes:
    """Returns JSON with sorted keys and two spaces, without NaN."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      ArtifactError: If the file is missing or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: must be JSON, {error}; delete it and rerun") from None


def require_inside(name: str) -> str:
    """Returns the name of a file; raises ValueError if that could lie outside its directory."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
        raise ValueError(f"a file must lie inside its directory, got {name!r}")
    return name


def require_inert(directory: Path) -> None:
    """Raises ArtifactError if a file of a policy is of a kind that runs code when it is read."""
    for path in sorted(directory.rglob("*")):
        if path.suffix in RUNS_CODE:
            raise ArtifactError(
                f"{path}: may hold a pickle or code, which runs when it is read; delete it"
            )


def remove(path: Path) -> None:
    """Removes a file or directory if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest(paths: Iterable[Path], value: Any = None) -> str:
    """Returns a SHA-256 over the names and contents of files (directories walked) and a value."""
    total = hashlib.sha256(json.dumps(value, sort_keys=True).encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                total.update(str(file).encode())
                total.update(bytes.fromhex(_known_sha256(file)))
    return total.hexdigest()


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _known_sha256(file: Path) -> str:
    """Returns a file's SHA-256: of a large one that has not changed since, the one that is known.

    With its content the system changes a file's ctime, which nobody can set.
    """
    if file.stat().st_size < LARGE_BYTES:
        return sha256_of(file)
    version = _version(file)
    known = HASHES / hashlib.sha256(str(file.absolute()).encode()).hexdigest()
    if known.exists():
        of, _, found = known.read_text().rpartition(" ")
        if of == version:
            return found
    found = sha256_of(file)
    is_settled = time.time() - file.stat().st_ctime > TICK_SECONDS
    if is_settled and _version(file) == version:
        write_bytes(known, f"{version} {found}".encode())
    return found


def _version(file: Path) -> str:
    about = file.stat()
    return f"{about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


@contextmanager
def exclusive(path: Path, holder: str) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel frees it when the process dies.

    Raises:
      BusyError: If another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{path}: {holder} is already running here; wait for it or stop it"
            ) from None
        yield


def host_lock(name: str, what: str) -> Path:
    """Returns the file by which a user's processes on this host lock what lies elsewhere.

    Args:
      what: Is hashed: it may hold credentials.
    """
    known = hashlib.sha256(f"{what} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"grpo-{name}-{known}.lock"


def _replace(source: Path, target: Path) -> None:
    """Moves `source` over `target`; a directory in the way is moved aside first."""
    if target.is_dir():
        aside = target.parent / f".{target.name}.{os.getpid()}.old"
        remove(aside)
        os.rename(target, aside)
        os.rename(source, target)
        remove(aside)
    else:
        os.replace(source, target)
    _sync(target.parent)


def _discard(path: Path) -> None:
    """Removes what can be removed: where Ray's processes still write, the next writer does."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _is_alive(temporary: Path) -> bool:
    """Returns whether the process that wrote `.NAME.PID.tmp` or `.old` is another, running one."""
    pid = int(temporary.name.split(".")[-2])
    return pid != os.getpid() and psutil.pid_exists(pid)


def _sync(path: Path) -> None:
    """Flushes a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
