"""This process: Ctrl-C, frozen imports, limits, and its end with its parent."""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells call it
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def stop_at_once(text: str) -> None:
    """Makes Ctrl-C print `text` and exit without a traceback, until `raise_interrupts`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_stop, text))


def raise_interrupts() -> None:
    """Undoes `stop_at_once`: from now on Ctrl-C raises KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(text: str, number: int, frame: object) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def freezing_imports() -> Iterator[None]:
    """Excludes the modules that the block imports from garbage collection.

    The block should only import: other objects that it creates would never be freed.
    """
    gc.disable()
    try:
        yield
    finally:
        freeze_imports()


def freeze_imports() -> None:
    """Excludes all existing objects from garbage collection, then enables collection.

    Model libraries create half a million permanent objects; scanning them repeatedly takes seconds.
    """
    gc.freeze()
    gc.enable()


def die_with_parent(parent: int) -> None:
    """Asks the kernel to terminate this process when the thread that started it ends.

    Args:
      parent: Process id of the parent, read before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call
            sys.exit(1)


def discard_output() -> None:
    """Connects input and output of this process and its later children to /dev/null."""
    faulthandler.disable()  # it may write elsewhere
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    # They need not write to these descriptors, e.g. in a test or one of Ray's actors.
    sys.stdout = sys.stderr = os.fdopen(null, "w")


def limit_resources(*, memory_bytes: int, file_bytes: int) -> None:
    """Limits this process and its later children, each for itself; dumps of memory are off.

    Args:
      memory_bytes: Private memory in addition to what this process has now; beyond it, allocations
        fail. Not limited on systems other than Linux.
      file_bytes: Size of a file that it writes.
    """
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_FSIZE, file_bytes)
    status = Path("/proc/self/status")
    if status.exists():
        # The limit counts what is reserved, also by the parent before a fork: VmData.
        _, _, after = status.read_text().partition("VmData:")
        _lower_limit(resource.RLIMIT_DATA, int(after.split()[0]) * 1024 + memory_bytes)


def _lower_limit(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    stated = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(stated), hard))


def become_subreaper() -> None:
    """Makes this process the parent of descendants whose own parents have ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
