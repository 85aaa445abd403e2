"""What a stage tells of its progress: a file for a flow, lines otherwise, and never a change."""

import re
from pathlib import Path

import pytest

from grpo.runtime.progress import CHANNEL, Progress, ProgressFile, format_duration, read_progress
from tests.pipeline.processes import run_stage
from tests.pipeline.workspaces import copy_for_stages, locked_stages

STAGE = "train@uniform-1"
OUTPUTS = ("policies/uniform-1", "training/uniform-1")


def outputs(workspace: Path) -> dict[str, bytes]:
    folders = [workspace / "artifacts" / each for each in OUTPUTS]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(workspace).as_posix(): file.read_bytes() for file in files}


def test_a_listener_sees_training_and_changes_no_byte(finished: Path, tmp_path: Path):
    workspace, channel = copy_for_stages(finished, tmp_path / "heard"), tmp_path / "channel"
    channel.mkdir()
    command = locked_stages(workspace)[STAGE]["cmd"]
    done = run_stage(workspace, STAGE, command, environment={CHANNEL: str(channel)})
    assert (done.code, done.stderr) == (0, "")
    seen = read_progress(channel, STAGE)
    assert seen is not None
    assert (seen.part, seen.done, seen.total) == ("train uniform-1", 4, 4)
    assert {"reward", "spread", "grad norm"} <= seen.numbers.keys() <= {*seen.numbers, "KL"}
    assert outputs(workspace) == outputs(finished)


def test_without_a_listener_a_stage_says_a_line_when_a_part_ends(finished: Path, tmp_path: Path):
    workspace = copy_for_stages(finished, tmp_path / "alone")
    done = run_stage(workspace, STAGE, locked_stages(workspace)[STAGE]["cmd"])
    number = r"-?[\d.e-]+"
    expected = (
        f"train uniform-1 4/4, reward {number}, spread {number}(, KL {number})?, "
        f"grad norm {number}, \\d+ s\n"
    )
    assert done.code == 0
    assert re.fullmatch(expected, done.stderr), done.stderr
    assert outputs(workspace) == outputs(finished)


def test_a_channel_that_cannot_be_written_fails_no_stage(finished: Path, tmp_path: Path):
    workspace = copy_for_stages(finished, tmp_path / "closed")
    command = locked_stages(workspace)[STAGE]["cmd"]
    done = run_stage(workspace, STAGE, command, environment={CHANNEL: "/dev/null/none"})
    assert (done.code, done.stderr) == (0, "")


def test_only_the_latest_state_is_kept_and_the_last_one_always(tmp_path: Path):
    write = ProgressFile(tmp_path, "base")
    for done in range(1, 1001):
        write(Progress(part="warm-up", done=done, total=1000))
    assert read_progress(tmp_path, "base") == Progress(part="warm-up", done=1000, total=1000)
    assert [each.name for each in tmp_path.iterdir()] == ["base.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"part": "a"}', '{"other": 1}'])
def test_a_broken_state_is_none(tmp_path: Path, content: str):
    (tmp_path / "base.json").write_text(content)
    assert read_progress(tmp_path, "base") is None


def test_durations_are_short():
    assert [format_duration(each) for each in (0.4, 59.4, 59.6, 725, 11220)] == [
        *("0 s", "59 s", "1:00", "12:05", "3:07:00")
    ]
