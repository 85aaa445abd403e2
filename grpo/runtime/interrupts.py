"""Ctrl-C while a program starts: its imports take seconds, in which it handles nothing."""

import os
import signal
import sys
from functools import partial

EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells call it


def stop_at_once(text: str) -> None:
    """Makes Ctrl-C one line, without a traceback, until `raise_interrupts`; nothing is lost yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_stop, text))


def raise_interrupts() -> None:
    """Ends `stop_at_once`: from here on Ctrl-C is a KeyboardInterrupt."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(text: str, number: int, frame: object) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
