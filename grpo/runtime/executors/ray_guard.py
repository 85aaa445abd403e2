"""Ends the processes of a local Ray cluster when the stage that started it has ended.

Started by path as `ray_guard.py STAGE`, the number of the stage's process; standard input is a pipe
from it. Without it, two of Ray's helpers live for a minute after a stage that was killed: they
report the loss of the node to a server that has ended, too.
"""

import os
import select
import sys
from contextlib import suppress

import psutil

SECONDS = 0.1  # between looks at the stage's processes, while the cluster starts


def main() -> None:
    """Waits until the stage closes the pipe, by its end at the latest, and kills what is left."""
    stage, own = psutil.Process(int(sys.argv[1])), os.getpid()
    pipe, seen, is_starting = sys.stdin.fileno(), set[psutil.Process](), True
    while True:
        is_told = bool(select.select([pipe], [], [], SECONDS if is_starting else None)[0])
        with suppress(psutil.Error):
            seen |= {each for each in stage.children(recursive=True) if each.pid != own}
        if is_told and not os.read(pipe, 1):
            break
        is_starting = is_starting and not is_told
    for each in seen:
        with suppress(psutil.Error):
            each.kill()


if __name__ == "__main__":
    main()
