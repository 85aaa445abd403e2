"""Files in memory, which the system frees when the process that made them ends, however it ends."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class MemoryFile:
    """A file in memory that other processes of the same user can read by its path."""

    def __init__(self, write: Callable[[BinaryIO], object]) -> None:
        """Args:
        write: Called once with the file, which is open for writing.
        """
        descriptor = os.memfd_create("grpo")
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            write(file)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Frees the memory once no process maps the file, as if this object did not exist."""
        self._close()
