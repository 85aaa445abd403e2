"""Ends the processes of a local Ray cluster when the stage that started it has ended.

Started by path as `ray_guard.py PROCESS:TIME...`; standard input is a pipe from the stage, and TIME
is when the process was started. Without it, two of Ray's helpers live for a minute after a stage
that was killed: they report the loss of the node to a server that has ended, too.
"""

import sys
from contextlib import suppress

import psutil


def main() -> None:
    """Waits until the stage closes the pipe, by its end at the latest, and kills what is left."""
    sys.stdin.buffer.read()
    for each in sys.argv[1:]:
        process, _, started = each.partition(":")
        with suppress(psutil.Error):
            found = psutil.Process(int(process))
            if str(found.create_time()) == started:  # otherwise another process has its number
                found.kill()


if __name__ == "__main__":
    main()
