"""Clocks that are set, or differ between processes: no stage, lock or duration goes by them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import libfaketime
import pytest

from flows.planning import plan
from grpo.lineage.lock import read_lock
from grpo.runtime.artifacts.files import exclusive, read_json
from tests import tiny_pipeline
from tests.faults import FaultLine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DAY_SECONDS = 86400
# Days by which the clock is off while a group of stages runs: it is set back, ahead and back.
JUMPS = {"base": 0, "train": -3, "evaluate": 10, "report": -1}

MEASURE = """
import sys, time
from pathlib import Path
from grpo.runtime.artifacts.files import BusyError, exclusive
from grpo.runtime.artifacts.usage import measured
began = time.time()
with measured("stage"):
    Path(sys.argv[1]).write_text("-3d")
assert time.time() < began - 86400
try:
    with exclusive(Path("lock"), "a stage"):
        pass
except BusyError as error:
    sys.exit(print(error))
"""


class Clock:
    """The clock of processes that run in its environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)

    def set(self, days: int) -> None:
        self.path.write_text(f"{days:+}d")

    def environment(self) -> dict[str, str]:
        _, preloaded = libfaketime.get_reload_information()
        return {
            **tiny_pipeline.environment(),
            **preloaded,
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
        }

    def run(self, root: Path, *command: str) -> str:
        return subprocess.run(
            command,
            cwd=root,
            env=self.environment(),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


def date_files(root: Path, since: float, days: int) -> None:
    """Gives files that were written since then the times that a clock that is off would have."""
    for path in root.rglob("*"):
        found = path.stat()
        if path.is_file() and since <= found.st_mtime <= time.time():
            os.utime(path, times=(found.st_mtime + days * DAY_SECONDS,) * 2)


@pytest.mark.long
@pytest.mark.fault
def test_a_clock_that_jumps_between_stages_changes_nothing(
    fresh_pipeline: Path, reproduced: Path, clock: Clock, fault: FaultLine
) -> None:
    for stages, days in JUMPS.items():
        since = time.time()
        clock.set(days)
        clock.run(fresh_pipeline, sys.executable, "-m", "dvc", "repro", "-q", stages)
        date_files(fresh_pipeline, since, days)
    with fault.recovery():
        changed = [step.name for step in plan() if step.is_changed]
    marks = list(map(str.split, (fresh_pipeline / ".work/marks.txt").read_text().splitlines()))
    started = [name for kind, name, *_ in marks if kind == "start"]
    dates = [float(when) for kind, _, when, _ in marks if kind == "start"]
    assert (changed, len(started)) == ([], len(read_lock(reproduced)))
    assert max(dates) - min(dates) > 12 * DAY_SECONDS  # the clock was set
    prompts = fresh_pipeline / "data/prompts.txt"
    before = prompts.stat().st_mtime
    prompts.write_text("2+2=\n")
    os.utime(prompts, times=(before - DAY_SECONDS,) * 2)
    assert next(step for step in plan() if step.name == "prepare").is_changed
    found = read_lock(fresh_pipeline)
    fault.tell(
        "clock set 3 days back, then 13 ahead, then 11 back between stages",
        "each stage ran once; a change dated into the past was seen",
        lost=[name for name, entry in read_lock(reproduced).items() if found.get(name) != entry],
    )


def test_durations_and_locks_do_not_go_by_the_clock(tmp_path: Path, clock: Clock) -> None:
    with exclusive(tmp_path / "lock", "this test"):
        said = clock.run(tmp_path, sys.executable, "-c", MEASURE, str(clock.path))
    assert said.startswith("lock: a stage is already running here")
    assert 0 < read_json(tmp_path / ".runs/stage.json")["seconds"] < 600
