"""The page of a finished run shows the run's parameters and warns if params.yaml differs."""

import sys
from pathlib import Path

import pytest

from grpo.__main__ import main
from grpo.runtime.artifacts.marks import ARTIFACTS, PAGE, changed_inputs
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import run_stage
from tests.pipeline.workspaces import locked_stages

RATE = "arms.uniform.training.learning_rate"
PART = 'class="banner" role="alert">'


def run_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def test_the_page_of_a_finished_run_has_no_banner_and_says_what_ran(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace)
    assert PART not in PAGE.read_text()
    assert changed_inputs(PAGE, ARTIFACTS) == []
    ran = "learning_rate: 0.001\n"
    assert ran in PAGE.read_text()
    set_param(RATE, 0.777)(workspace)
    run_command("report", monkeypatch)
    page = PAGE.read_text()
    assert ran in page
    assert "learning_rate: 0.777" not in page
    run_command("summary", monkeypatch)
    printed = " ".join(capsys.readouterr().out.split())
    for text in (page.partition(PART)[2], printed):
        assert f"{RATE} is 0.777 there, but 0.001 in curriculum@uniform, train@uniform-1" in text


def test_a_stage_that_fails_stamps_the_page_of_the_run_before(workspace: Path) -> None:
    set_param("arms.uniform.training.updates_per_iteration", 0)(workspace)
    name = "train@uniform-1"
    done = run_stage(workspace, name, locked_stages(workspace)[name]["cmd"])
    assert done.code == 2
    banner = (workspace / PAGE).read_text().partition(PART)[2].partition("</p>")[0]
    assert (
        f"{name} failed</strong> params.yaml: arms.uniform.training.updates_per_iteration" in banner
    )
