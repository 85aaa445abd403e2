"""Helpers that compare files or make them unreadable."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = 0x20080522  # of the kernel's header, with two words per set
PASSES_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def bound_by_modes() -> Iterator[None]:
    """Drops root's capability to bypass file permissions within the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~PASSES_MODES
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the bytes of every file below a directory by its path there, hidden ones too."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
