"""Runs the stages of dvc.yaml side by side under Prefect; never imports torch."""

import sys

from grpo.runtime.process import stop_at_once

INTERRUPTED = "stopped; finished stages are kept, run again to go on"

if sys.argv[0] == "-m":  # a command starts: Python has yet to find its module
    stop_at_once(INTERRUPTED)
