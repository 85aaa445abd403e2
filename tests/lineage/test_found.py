"""A rollout or a prompt behind an artifact is found in every iteration that sampled it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo.errors import ArtifactError
from grpo.lineage.found import find_rollouts
from grpo.lineage.lock import read_lock
from grpo.lineage.measures import measures
from grpo.lineage.trace import trace
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import CREDIT, REWARDS, ROLLOUTS, read_table, write_table
from tests import tiny_pipeline
from tests.report.finished_run import write_later_iteration, write_round

POLICY = Path("artifacts/policies/a-1")


@pytest.fixture
def trained(workspace: Path) -> Path:
    """A workspace whose round a-1 has three iterations, which all sample the prompt `half`."""
    write_round(workspace / "artifacts", "a-1", sampling=30, update=20)
    for index in (1, 2):
        write_later_iteration(workspace / "artifacts", "a-1", index)
    return workspace


def test_a_rollout_of_a_later_iteration_is_named_with_it(trained: Path) -> None:
    """half/2 is in the third iteration alone, whose groups have three rollouts."""
    (found,) = find_rollouts(trace(POLICY, trained), "half/2", trained)
    path = trained / "artifacts/training/a-1/iteration-0002"
    assert found.files.table == path / "rollouts/table.parquet"
    table = read_table(found.files.table, ROLLOUTS)
    assert table["rollout_id"][found.row] == "half/2"
    judged = read_table(path / "rewards.parquet", REWARDS).set_index("rollout_id")
    assert (found.outcome, found.reward) == (
        judged["outcome"]["half/2"],
        judged["reward"]["half/2"],
    )
    used = read_table(path / "credit.parquet", CREDIT).set_index("rollout_id")
    assert (found.update, found.advantage) == (
        used["update"]["half/2"],
        used["advantage"]["half/2"],
    )
    assert str(found).startswith("a-1, iteration 3 of 3: half/2 in row 2 of ")


@pytest.mark.parametrize("identity", ["never", "never/1", "half", "half/0", "always", "always/1"])
def test_all_rollouts_of_a_prompt_are_found_in_all_iterations(trained: Path, identity: str) -> None:
    expected = []
    for each in iterations_of(trained / "artifacts", "a-1"):
        table = read_table(each.table, ROLLOUTS)
        own = table[(table["prompt_id"] == identity) | (table["rollout_id"] == identity)]
        expected += [(each.index, int(row), name) for row, name in own["rollout_id"].items()]
    found = find_rollouts(trace(POLICY, trained), identity, trained)
    assert [(each.files.index, each.row, each.rollout_id) for each in found] == expected


@pytest.mark.parametrize("identity", ["half", "half/0"])
def test_a_task_s_own_id_finds_the_prompt_that_prepare_has_named(
    trained: Path, identity: str
) -> None:
    """Stage prepare puts "train-" in front of ids that do not start with it."""
    expected = find_rollouts(trace(POLICY, trained), identity, trained)
    for each in iterations_of(trained / "artifacts", "a-1"):
        for path, schema in [
            (each.table, ROLLOUTS),
            (each.rewards, REWARDS),
            (each.credit, CREDIT),
        ]:
            table = read_table(path, schema)
            ids = [name for name in ("rollout_id", "prompt_id") if name in table]
            write_table(
                table.assign(**{name: "train-" + table[name] for name in ids}), path, schema
            )
    found = find_rollouts(trace(POLICY, trained), identity, trained)
    assert [each.rollout_id for each in found] == [f"train-{each.rollout_id}" for each in expected]


def test_a_rollout_that_several_judges_scored_has_their_scores(trained: Path) -> None:
    path = trained / "artifacts/rewards/a-1.parquet"
    write_table(
        read_table(path, REWARDS).assign(**{"score.length": 0.25, "score.form": 1.0}), path, REWARDS
    )
    first = find_rollouts(trace(POLICY, trained), "half/1", trained)[0]
    assert first.scores == {"length": 0.25, "form": 1.0}
    assert "; scored, length 0.250, form 1.000, outcome " in str(first)


def test_a_rollout_of_a_revision_is_shown_with_its_first_answer(trained: Path) -> None:
    path = trained / "artifacts/rollouts/a-1/table.parquet"
    table = read_table(path, ROLLOUTS)
    is_revised = table["prompt_id"] == "half"
    first = {"first_answer": "seven, or so", "first_score": np.where(is_revised, 0.25, np.nan)}
    write_table(table.assign(**first), path, ROLLOUTS)
    policy = trace(POLICY, trained)
    assert "; revises 'seven, or so' of score 0.250; scored, outcome " in str(
        find_rollouts(policy, "half/1", trained)[0]
    )
    assert "revises" not in str(find_rollouts(policy, "always/1", trained)[0])


def test_a_rollout_that_no_update_used_is_said_to_be_in_none(trained: Path) -> None:
    path = trained / "artifacts/training/a-1/credit.parquet"
    write_table(read_table(path, CREDIT).iloc[:3], path, CREDIT)
    first = find_rollouts(trace(POLICY, trained), "half/1", trained)[0]
    assert first.update is None
    assert str(first).endswith("in no update")


def test_what_no_round_behind_the_artifact_has_is_refused_in_one_line(trained: Path) -> None:
    with pytest.raises(ArtifactError, match=r"half/9: must be .*/a-1, which are a-1$"):
        find_rollouts(trace(POLICY, trained), "half/9", trained)
    with pytest.raises(ArtifactError, match=r"policies/base, which are none"):
        find_rollouts(trace(Path("artifacts/policies/base"), trained), "half", trained)


def test_the_command_prints_a_line_per_rollout(trained: Path) -> None:
    def call(identity: str) -> "subprocess.CompletedProcess[str]":
        words = ["-m", "grpo", "lineage", str(POLICY), "--find", identity]
        return subprocess.run([sys.executable, *words], cwd=trained, capture_output=True, text=True)

    done = call("half/0")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        f"a-1, iteration {number} of 3" for number in (1, 2, 3)
    ]
    refused = call("half/9")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)


def test_what_iterations_store_is_no_measure_of_the_stage(workspace: Path) -> None:
    """MLflow gets the summary and the curves of the whole round, as without iterations."""
    before = measures(workspace, read_lock(workspace)["train@a-1"])
    work = workspace / "work.py"
    line = "    target.mkdir()\n"
    later = '    (target / "iteration-0001/rollouts").mkdir(parents=True)\n'
    for name in ("rollouts/summary.json", "summary.json"):
        later += f'    (target / "iteration-0001/{name}").write_text(\'{{"rollouts": 3}}\')\n'
    later += '    (target / "iteration-0001/updates.csv").write_text("update,loss\\n9,9\\n")\n'
    text = work.read_text()
    assert text.count(line) == 1
    work.write_text(text.replace(line, line + later))
    tiny_pipeline.reproduce_in_process(workspace, "train@a-1")
    after = measures(workspace, read_lock(workspace)["train@a-1"])
    assert (workspace / "artifacts/policies/a-1/iteration-0001/updates.csv").exists()
    assert [(each.name, each.update) for each in after] == [
        (each.name, each.update) for each in before
    ]
