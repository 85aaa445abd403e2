"""One file per DVC stage: read parameters and artifacts, call grpo, write artifacts."""

import gc
import os
import sys

from grpo.runtime.fork_client import run_in_preloaded
from grpo.runtime.process import stop_at_once

PARENT = os.getppid()  # read before the slow imports of the stage: the parent may exit meanwhile

INTERRUPTED = "stopped; run again to resume"

if sys.argv[0] == "-m":  # `python -m stages.NAME`, before Python imports the module
    stop_at_once(INTERRUPTED)
    if sys.argv[1:] in (["-h"], ["--help"]):
        from stages.usage import print_usage  # imported here: no stage needs it

        print_usage()
        sys.exit()
    run_in_preloaded(PARENT)  # under flows; does not return if there is a preloaded process
    gc.disable()  # imports create many objects and no garbage; `run` enables it
