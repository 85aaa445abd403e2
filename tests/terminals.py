"""Runs a command on a pseudo terminal."""

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
IN_THE_WAY = ("NO_COLOR", "FORCE_COLOR", "PAGER", "MANPAGER", "LESS")


def without_settings(environment: Mapping[str, str], **more: str) -> dict[str, str]:
    """Returns an environment without what a person may have set for their terminal."""
    kept = {name: each for name, each in environment.items() if name not in IN_THE_WAY}
    return {**kept, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", **more}


def run_on_terminal(command: Sequence[str], workspace: Path, environment: Mapping[str, str]) -> str:
    """Returns what a command writes on a terminal; it must succeed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=workspace, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # the last writer has closed the terminal
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0, said.decode()
    return said.decode()
