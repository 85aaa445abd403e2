"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""

import gc
import os
import signal
import sys

PARENT = os.getppid()  # before the stage's imports take seconds, in which it may die

INTERRUPTED = "stopped; run again to go on from where it was"
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells call it


def _stop_at_once(number: int, frame: object) -> None:
    """Ends a stage that is interrupted during imports, without a traceback; nothing is lost."""
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop_at_once)  # until `run`, which handles it

if sys.argv[0] == "-m":  # a stage starts: Python has yet to find its module
    gc.disable()  # its imports make many objects and no garbage; `run` enables it
