"""What a run shows: a table on a terminal, lines without one, nothing with --quiet."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.live import Row, _running, displayed
from flows.preloaded import _late_modules
from flows.runner import PROGRESS
from grpo.modalities import find_modality
from grpo.runtime.progress import Progress, read_progress
from tests import tiny_pipeline
from tests.terminals import COLOR, CONTROL, run_on_terminal, without_settings

# DVC itself uses what pygtrie deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COMMAND = [sys.executable, "-m", "flows.reproduce", "--no-server"]
STAGES = ["prepare", "base", "train@a-1", "train@b-1", "evaluate@a-1", "evaluate@b-1", "report"]
# What a train stage of the tiny pipeline does with its progress.
REPORTS = """\
if round_ and out.startswith("artifacts/policies"):
    from stages.progress import shown
    with shown(f"train {name}") as progress:
        progress.note({"reward": 0.25, "grad norm": 1.5})
        progress(3, 4)
        time.sleep(1)
        progress(4, 4)
"""


@pytest.fixture
def pipeline(fresh_pipeline: Path) -> Path:
    """A pipeline whose train stages report their progress."""
    work = fresh_pipeline / "work.py"
    marker = "while Path(f"
    work.write_text(work.read_text().replace(marker, f"{REPORTS}{marker}"))
    return fresh_pipeline


def run(workspace: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *options],
        cwd=workspace,
        env=without_settings(tiny_pipeline.environment()),
        capture_output=True,
        text=True,
        check=False,
    )


def run_flow_on_terminal(workspace: Path, **more: str) -> str:
    environment = without_settings(tiny_pipeline.environment(), **more)
    return run_on_terminal(COMMAND, workspace, environment)


def test_a_terminal_shows_one_table_with_a_row_per_stage(pipeline: Path) -> None:
    said = run_flow_on_terminal(pipeline)
    assert COLOR.search(said)
    plain = CONTROL.sub("", said)
    first, last = plain.index("stage  "), plain.rindex("stage  ")
    titles = plain[first:].splitlines()[0].split()
    assert titles == ["stage", "done", "elapsed", "left"]  # no number is known yet
    # The last drawing stays, and then there is the verdict.
    title, *rows, caption, verdict = plain[last:].splitlines()
    assert title.split()[-3:] == ["reward", "grad", "norm"]
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert sorted(cells) == sorted(STAGES)
    assert {row[0] for row in cells.values()} == {"Completed"}
    assert cells["train@a-1"][1] == "4/4"
    assert cells["train@a-1"][-2:] == ["0.25", "1.5"]
    assert caption.startswith("7/7 stages up to date, ")
    assert verdict.startswith("7 stages are up to date; 7 ran in ")
    assert "━" in said  # the bar of a stage that runs
    assert re.search(r"train@a-1 +[━╸╺]+ +3/4", plain)
    assert "started" not in said
    assert plain.count("base working on base\n") == 1  # above the table


def test_a_stage_that_ran_before_has_the_time_that_is_left() -> None:
    row = Row(stage="base", state="Running", seconds=12.0, last_seconds=72.0)
    assert row.left == "1:00"
    assert _running(row) == "runs, 12 s, 1:00 left"
    late = Row(stage="base", state="Running", seconds=80.0, last_seconds=72.0)
    assert (late.left, _running(late)) == ("", "runs, 1:20")
    progress = Progress(part="train a-1", done=3, total=4, numbers={"reward": 0.25})
    known = Row(stage="base", state="Running", seconds=5.0, progress=progress)
    assert _running(known) == "train a-1 3/4, reward 0.25, 5 s"


@pytest.mark.long
def test_no_color_is_respected_on_a_terminal(pipeline: Path) -> None:
    said = run_flow_on_terminal(pipeline, NO_COLOR="1")
    codes = {code for each in COLOR.findall(said) for code in each[2:-1].split(";")}
    assert codes <= {"", "0", "1", "2", "3"}  # bold, dim and italic are no colors


@pytest.mark.long
def test_without_a_terminal_a_stage_has_a_line_when_it_starts_and_ends(pipeline: Path) -> None:
    done = run(pipeline)
    assert done.returncode == 0, done.stderr
    assert CONTROL.search(done.stderr) is None
    for name in STAGES:
        said = [line.removeprefix(f"{name} ") for line in done.stderr.splitlines()]
        mine = [line for line in said if re.match(r"started|Completed in [\d.]+ s \(\d/7\)", line)]
        assert len([each for each in done.stderr.splitlines() if each.startswith(f"{name} ")]) <= 3
        assert mine[-1].startswith("Completed"), name
    assert "train@a-1 started\n" in done.stderr
    assert done.stderr.count("(7/7)") == 1
    assert read_progress(pipeline / PROGRESS, "train@b-1") == Progress(
        part="train b-1", done=4, total=4, numbers={"reward": 0.25, "grad norm": 1.5}
    )


@pytest.mark.long
def test_quiet_leaves_the_verdict_and_errors(pipeline: Path) -> None:
    done = run(pipeline, "--quiet")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    tiny_pipeline.replace(pipeline, "rate: 0.1", "rate: 0.1, fails: 2")
    tiny_pipeline.replace(pipeline, "rate: 0.2", "rate: 0.2, fails: 2")
    done = run(pipeline, "--quiet")
    assert (done.returncode, done.stdout) == (2, "")
    verdict, *errors = done.stderr.splitlines()
    assert verdict.startswith("2 of 7 stages are up to date; ")
    assert "; 2 failed; 3 not reached" in verdict
    assert sorted(each.partition(" must")[0] for each in errors) == [
        f"train@{name}-1: rounds.{name}-1.fails" for name in "ab"
    ]


def test_the_rows_of_a_block_that_fails_end_and_the_display_with_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = Row(stage="base", state="Failed", seconds=2.0)
    with pytest.raises(ZeroDivisionError), displayed(lambda: [row], total=1):
        raise ZeroDivisionError
    assert capsys.readouterr().err == "base Failed after 2.0 s\n"


def test_reading_parameters_does_not_change_what_is_preloaded() -> None:
    """Parameters replace the name of a modality's module by the modality."""
    file = tiny_pipeline.SOURCE / "recipes" / "smoke.yaml"
    before = _late_modules(["stages.train"], file)
    find_modality("tokens")
    assert _late_modules(["stages.train"], file) == before
    assert "grpo.modalities.tokens.policy" in before
