"""Parts are found by the names of their files, and a file without one is named."""

import sys
from pathlib import Path

import pytest

from grpo.errors import ParameterError
from grpo.rewards import find_judge, judge_names
from grpo.rewards.base import Judge
from grpo.tasks import find_task, task_kinds
from grpo.tasks.base import Task


def test_every_file_holds_the_part_that_its_name_promises():
    for name in judge_names():
        assert isinstance(find_judge(name), Judge)
    for kind in task_kinds():
        found = find_task(kind)
        assert issubclass(found, Task)
        assert found.__module__ == f"grpo.tasks.{kind}"  # not one that it imports


def test_a_file_without_a_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty.py").write_text("from grpo.tasks.glyphs import GlyphsTask\n")
    for package in ("grpo.rewards", "grpo.tasks"):
        folder = sys.modules[package]
        monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    assert "empty" in judge_names()
    with pytest.raises(ParameterError, match=r"grpo/rewards/empty\.py: must define JUDGE"):
        find_judge("empty")
    with pytest.raises(ParameterError, match=r"grpo/tasks/empty\.py: must define .* Task"):
        find_task("empty")
    for package in ("grpo.rewards", "grpo.tasks"):
        monkeypatch.delitem(sys.modules, f"{package}.empty")
