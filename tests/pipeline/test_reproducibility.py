"""Two fresh workspaces agree to the byte, and a change reruns only the affected stages."""

from pathlib import Path
from typing import Any

import pytest

from tests.files import contents
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import run_stage
from tests.pipeline.workspaces import (
    check_out,
    copy_for_dvc,
    dvc,
    locked_stages,
    opened,
)

ONCE_PER_RUN = {"check", "report", "lineage"}
ROUNDS = ("uniform-1", "sgpo-1")


def to_run(workspace: Path) -> set[str]:
    """Returns the stages that `dvc repro` would run, if every one of them changes its output."""
    # Unlike `dvc repro --dry`, it can tell of stages whose inputs are yet to be written.
    with opened(workspace) as repo:
        changed = set(repo.status())
    # The check's output is a constant: nothing follows from running it again.
    return changed | downstream(locked_stages(workspace), changed - {"check"})


def commit(workspace: Path, stage: str) -> None:
    """Records what a stage that ran has written."""
    with opened(workspace) as repo:
        repo.commit(stage, force=True)


def run_again(workspace: Path, *stages: str) -> None:
    for stage in stages:
        done = run_stage(workspace, stage, locked_stages(workspace)[stage]["cmd"])
        assert done.code == 0, done.stderr
        commit(workspace, stage)


def downstream(stages: dict[str, Any], changed: set[str]) -> set[str]:
    """Returns the stages that read, directly or not, what the changed ones write."""
    reached = changed & stages.keys()
    while True:
        written = [out["path"] for name in reached for out in stages[name].get("outs", ())]
        grown = reached | {
            name
            for name, stage in stages.items()
            for dep in stage["deps"]
            for path in written
            if f"{path}/".startswith(f"{dep['path']}/")
        }
        if grown == reached:
            return reached
        reached = grown


def results_of(workspace: Path) -> dict[str, bytes]:
    """Returns all artifacts but the page, which shows seconds, and dvc's own files."""
    found = contents(workspace / "artifacts")
    del found["report/index.html"]
    return {path: content for path, content in found.items() if not path.endswith(".gitignore")}


def test_nothing_runs_twice(finished: Path):
    with opened(finished) as repo:
        assert repo.status() == {}


def test_what_the_price_of_training_reads_plans_the_arm_again(finished: Path, tmp_path: Path):
    """An optional parameter: nothing reads it until it is stated."""
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("arms.uniform.training.passes_per_iteration", 2)(workspace)
    assert "curriculum@uniform" in to_run(workspace)


def test_a_reward_parameter_runs_the_score_and_what_follows(finished: Path, tmp_path: Path):
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("reward.unfinished_penalty", 0.5)(workspace)
    by_round = {f"{stage}@{name}" for stage in ("score", "train", "evaluate") for name in ROUNDS}
    assert to_run(workspace) == by_round | ONCE_PER_RUN


@pytest.mark.long  # `score` is judged anew by the test above
def test_a_parameter_that_decides_outcomes_runs_profile_and_evaluation_too(
    finished: Path, tmp_path: Path
):
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("reward.threshold", 0.5)(workspace)
    run_again(workspace, "check", "prepare")  # which tries the judge on the task's answers
    assert to_run(workspace) == locked_stages(workspace).keys() - {"check", "prepare", "base"}


def test_an_objective_runs_the_training_of_its_arm(finished: Path, tmp_path: Path):
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("arms.sgpo.objective.0.rloo.high", 0.3)(workspace)
    # The allocation may read the objective; here the curriculum writes the same again.
    run_again(workspace, "curriculum@sgpo")
    assert to_run(workspace) == {"train@sgpo-1", "evaluate@sgpo-1"} | ONCE_PER_RUN


JUDGE = "def mine(completions, **columns):\n    return [0.5 for each in completions]\n"
LINK = '''
from grpo import Link, Objective, credit_link

def halves() -> Objective:
    """Halves advantages."""
    return credit_link(Link("halves", {}), lambda before, rollouts, generator: before)
'''


def with_parts_of_ones_own(finished: Path, target: Path) -> Path:
    """Returns a workspace with a judge and a link under plugins/, as after `dvc repro`."""
    workspace = copy_for_dvc(finished, target)
    (workspace / "plugins/mine.py").write_text(JUDGE)
    (workspace / "plugins/halves.py").write_text(LINK)
    set_param("reward.judges.0.judge", "plugins.mine")(workspace)
    set_param("reward.answer_pattern", None)(workspace)
    set_param("reward.timeout_seconds", None)(workspace)
    set_param("arms.sgpo.objective", ["rloo", "plugins.halves"])(workspace)
    run_again(workspace, "check")
    with opened(workspace) as repo:  # as if all others had run
        repo.commit(force=True)
    return workspace


@pytest.mark.long
def test_a_changed_judge_of_ones_own_runs_what_judges_and_not_the_base(
    finished: Path, tmp_path: Path
):
    workspace = with_parts_of_ones_own(finished, tmp_path / "workspace")
    (workspace / "plugins/mine.py").write_text(JUDGE.replace("0.5", "0.25"))
    run_again(workspace, "check", "prepare")
    assert to_run(workspace) == locked_stages(workspace).keys() - {"check", "prepare", "base"}


@pytest.mark.long
def test_a_changed_link_of_ones_own_runs_training_and_a_file_without_a_name_runs_nothing(
    finished: Path, tmp_path: Path
):
    workspace = with_parts_of_ones_own(finished, tmp_path / "workspace")
    (workspace / "plugins/other.py").write_text("x = 1\n")
    run_again(workspace, "check")
    assert to_run(workspace) <= {"lineage"}  # which depends on all of plugins/
    (workspace / "plugins/halves.py").write_text(LINK + "\n")
    run_again(workspace, "check", "curriculum@uniform", "curriculum@sgpo")
    trained = {f"{stage}@{name}" for stage in ("train", "evaluate") for name in ROUNDS}
    assert to_run(workspace) == trained | {"report", "lineage"}


def test_a_new_round_runs_alone(finished: Path, tmp_path: Path):
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("rounds.sgpo-2", {"arm": "sgpo", "start": "sgpo-1", "phase": 1})(workspace)
    stages = ("rollout", "score", "train", "evaluate")
    assert to_run(workspace) == {f"{stage}@sgpo-2" for stage in stages} | ONCE_PER_RUN


@pytest.mark.long
def test_dvc_repro_in_a_fresh_workspace_ends_with_the_same_bytes(finished: Path, tmp_path: Path):
    workspace = check_out(tmp_path)
    dvc(workspace, "repro", "--quiet")
    assert results_of(workspace) == results_of(finished)
    changing = {"report", "lineage"}  # a page shows seconds, and lineage reads pages
    first, second = (
        {stage: entry for stage, entry in locked_stages(root).items() if stage not in changing}
        for root in (workspace, finished)
    )
    assert first == second
