"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""

import gc
import os
import sys

from grpo.runtime.process import stop_at_once

PARENT = os.getppid()  # before the stage's imports take seconds, in which it may die

INTERRUPTED = "stopped; run again to go on from where it was"

if sys.argv[0] == "-m":  # a stage starts: Python has yet to find its module
    stop_at_once(INTERRUPTED)
    gc.disable()  # its imports make many objects and no garbage; `run` enables it
