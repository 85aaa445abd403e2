"""Runs the stages of dvc.yaml in parallel under Prefect; never imports torch."""

import sys

from grpo.runtime.process import stop_at_once

INTERRUPTED = "stopped; finished stages are kept, run again to go on"

if sys.argv[0] == "-m":  # `python -m` is still resolving the module of the command
    stop_at_once(INTERRUPTED)
