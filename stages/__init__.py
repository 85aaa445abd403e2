"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""

import gc
import os
import sys

PARENT = os.getppid()  # before the stage's imports take seconds, in which it may die

if sys.argv[0] == "-m":  # a stage starts: Python has yet to find its module
    gc.disable()  # its imports make many objects and no garbage; `run` enables it
