"""What DVC would run, and in which order."""

from pathlib import Path

import pytest

from flows.planning import Hints, plan
from grpo.errors import ParameterError
from tests import tiny_pipeline

# DVC itself uses what pygtrie deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ORDER = [
    "prepare", "base", "train@a-1", "train@b-1", "evaluate@a-1", "evaluate@b-1", "report",
]  # fmt: skip


def test_every_stage_comes_after_those_it_reads_from(fresh_pipeline: Path) -> None:
    steps = plan()
    assert [step.name for step in steps] == ORDER
    assert all(step.is_changed for step in steps)
    before = {step.name: set(step.upstream) for step in steps}
    assert before["train@a-1"] == {"base", "prepare"}
    assert before["report"] == {
        "base", "train@a-1", "train@b-1", "evaluate@a-1", "evaluate@b-1",
    }  # fmt: skip


def test_hints_come_from_meta_exec(fresh_pipeline: Path) -> None:
    hints = {step.name: step.hints for step in plan()}
    assert hints["train@a-1"] == Hints(retries=1, timeout_s=60)
    assert hints["base"] == Hints()


def test_only_changed_stages_are_marked(finished_pipeline: Path) -> None:
    assert not any(step.is_changed for step in plan())
    tiny_pipeline.replace(finished_pipeline, "rate: 0.2", "rate: 0.3")
    changed = [step.name for step in plan() if step.is_changed]
    assert changed == ["train@b-1", "report"]


@pytest.mark.parametrize("left", ["", '{"write": {}, "re'])
def test_a_list_of_locks_that_a_kill_has_cut_does_not_stop_the_next_run(
    fresh_pipeline: Path, left: str
) -> None:
    """DVC writes it in place when each of its commands starts and ends."""
    (fresh_pipeline / ".dvc/tmp/rwlock").write_text(left)
    assert [step.name for step in plan()] == ORDER


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("base", ["prepare", "base"]),
        ("train", ["prepare", "base", "train@a-1", "train@b-1"]),
        ("artifacts/evaluations/a-1.json", ["prepare", "base", "train@a-1", "evaluate@a-1"]),
    ],
)
def test_a_target_brings_what_it_reads(fresh_pipeline: Path, target: str, names: list[str]) -> None:
    assert [step.name for step in plan([target])] == names


def test_an_unknown_target_is_one_line(fresh_pipeline: Path) -> None:
    with pytest.raises(ParameterError, match="'nothing'"):
        plan(["nothing"])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{tries: 1}", r"train@a-1\.meta\.exec\.tries must be one of gpu, retries, timeout_s"),
        ("{retries: many}", r"meta\.exec\.retries must be a number >= 0, got 'many'"),
        ("{retries: 1", r"^dvc\.yaml: "),
    ],
)
def test_a_wrong_hint_names_its_stage(fresh_pipeline: Path, written: str, message: str) -> None:
    path = fresh_pipeline / "dvc.yaml"
    path.write_text(path.read_text().replace("{retries: 1, timeout_s: 60}", written))
    with pytest.raises(ParameterError, match=message):
        plan()


@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml"])
def test_a_loop_of_aliases_is_refused_before_dvc_follows_it(fresh_pipeline: Path, name: str):
    path = fresh_pipeline / name
    path.write_text(f"{path.read_text()}extra: &x [*x]\n")
    with pytest.raises(ParameterError, match=rf"^{name}: extra\[0\] is an alias of its own"):
        plan()
