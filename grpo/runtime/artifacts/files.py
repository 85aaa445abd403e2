"""Files in and out, atomic and the same bytes for the same content; scratch space for resumes."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from grpo.errors import ArtifactError, BusyError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
MISUSED = (
    errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY,
    errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV,
)  # fmt: skip
HASHES = Path(".work/hashes")  # of large files, by name
LARGE_BYTES = 2**26
TICK_SECONDS = 2.0  # of the coarsest clock: a change within one would not show
# What a writer leaves beside `NAME` if it is killed: .NAME.PID.grpo-tmp, or -old. No person or
# program other than this module writes such names (.dvcignore has them too).
TEMPORARY, ASIDE = "grpo-tmp", "grpo-old"
SEAL_FILE = "made-by-grpo.json"  # SHA-256 by name of what a command wrote beside it
SEAL_COMMENT = b"<!-- made by grpo, SHA-256 of the above: "
RUNS_CODE = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth", ".py")
WORK = Path(".work")
CODE = (Path("grpo"), Path("stages"))  # what any of a stage's bytes may depend on


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
    for left, writer in _left_beside(path):
        if writer == os.getpid() or not _is_running(writer):
            _discard(left)
    temporary = _beside(path, TEMPORARY)
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
    """Makes one line of a disk that is full, and of a place that is missing, closed or misused.

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
    """Refuses what is neither a file nor a directory, such as a named pipe: reading it may hang.

    Raises:
      ArtifactError: If something else is there.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ArtifactError(
            f"{path}: must be a file or a directory, is a pipe, a socket or a device; correct the "
            "path"
        )


@contextmanager
def named_output(path: Path) -> Iterator[Path]:
    """Yields a temporary for what a person asked to be written at `path`, and seals it.

    The seal holds hashes of all files, so that the next call replaces what this one wrote and
    nothing else: `SEAL_FILE` in a directory, a comment at the end of an SVG.

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
    """Refuses to replace what is not known to be an unchanged output of `named_output`.

    Raises:
      ArtifactError: If `path` is a directory with files, or a file, of other origin.
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
            f"{path}: must be free, or an output of this command that nobody changed; name "
            "another place, or delete it"
        )


def _is_sealed(directory: Path) -> bool:
    seal = directory / SEAL_FILE
    if not seal.is_file() or any(each.is_symlink() for each in directory.rglob("*")):
        return False
    hashes = _hashes(directory)
    return seal.read_bytes() == canonical_json(hashes)


def _hashes(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory, and "" for what is no file."""
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
    """Returns JSON with sorted keys and two spaces, without NaN."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      ArtifactError: If the file is missing or no JSON.
    """
    require_plain(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; run the stage that writes it") from None
    except (ValueError, RecursionError) as error:  # of the syntax, of a number's digits, of depth
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
                total.update(bytes.fromhex(known_sha256(file)))
    return total.hexdigest()


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def known_sha256(file: Path) -> str:
    """Returns a file's SHA-256: of a large one that has not changed since, the one that is known.

    With its content the system changes a file's ctime, which nobody can set.
    """
    if file.stat().st_size < LARGE_BYTES:
        return sha256_of(file)
    version = _version(file)
    known = HASHES / hashlib.sha256(str(file.absolute()).encode()).hexdigest()
    if known.exists():
        of, _, found = known.read_text(encoding="utf-8").rpartition(" ")
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
    """Moves `source` over `target`; a directory in the way is moved aside first.

    Raises:
      ArtifactError: If one is a directory and the other is none.
    """
    if target.exists() and target.is_dir() != source.is_dir():
        wanted = "a directory" if source.is_dir() else "a file"
        raise ArtifactError(f"{target}: must be {wanted} or free; move what is there, then rerun")
    if target.is_dir():
        aside = _beside(target, ASIDE)
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


def _beside(path: Path, suffix: str) -> Path:
    """Returns this process's temporary sibling of a path."""
    return path.parent / f".{path.name}.{os.getpid()}.{suffix}"


def _left_beside(path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the temporary siblings of a path, and the processes that wrote them."""
    form = re.compile(rf"\.{re.escape(path.name)}\.([1-9][0-9]{{0,6}})\.({TEMPORARY}|{ASIDE})")
    for name in os.listdir(path.parent):
        if found := form.fullmatch(name):
            yield path.parent / name, int(found[1])


def remove_left_beside(path: Path) -> None:
    """Removes the temporary siblings that killed writers of a path have left."""
    for left, writer in _left_beside(path):
        if not _is_running(writer):
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
    """`.work/STAGE/FINGERPRINT`: other code, inputs or parameters never see what lies there."""

    def __init__(self, stage: str, fingerprint: str, *, part: str = "") -> None:
        self._stage = WORK / stage
        self.directory = self._stage / fingerprint[:32] / part

    def latest(self) -> tuple[int, Path] | None:
        """Returns the number and path of the newest whole checkpoint."""
        found = sorted(self.directory.glob("checkpoint-*"))
        return (int(found[-1].name.rpartition("-")[2]), found[-1]) if found else None

    def save(self, number: int, write: Callable[[Path], None]) -> None:
        """Writes checkpoint `number` atomically and drops the older ones."""
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
        """Removes all scratch of the stage, that of other fingerprints too."""
        remove(self._stage)
