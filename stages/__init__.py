"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""

import os

PARENT = os.getppid()  # before the stage's imports take seconds, in which it may die
