"""Rounds of several iterations: on-policy rollouts, the same bytes however they are made."""

import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from benchmarks.iteration_kills import workers_of
from grpo.modalities.shared.directories import read_state
from grpo.params.parameters import read_params
from grpo.report.seconds import timeline
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.usage import USAGE, Usage
from grpo.sampling.rollouts import read_batch
from grpo.types import Cost
from grpo.wiring.iterations import build_learning_rate
from grpo.wiring.policies import draws_of_round, load_policy
from stages import train
from tests.files import contents
from tests.pipeline.corruptions import set_param
from tests.pipeline.processes import run_stage, start_stage
from tests.pipeline.workspaces import copy_for_stages, locked_stages

NAME = "uniform-1"  # 16 prompts with 8 rollouts each
ITERATIONS = 8
OUTPUTS = (f"artifacts/policies/{NAME}", f"artifacts/training/{NAME}")
SCHEDULE = {"kind": "cosine", "warmup_updates": 0, "total_updates": ITERATIONS}
OVERLONG = {"max_steps": 4, "buffer_steps": 3, "penalty": 0.5}  # stages must agree about it
CORRECTED = [
    {"truncate_mismatch": {"weight_max": 2.0}},
    {"grpo": {"low": 0.2, "high": 0.28, "beta": 0.01}},
    "drop_uniform_groups",
    {"add_entropy_bonus": {"weight": 0.001}},
]


def set_executor(workspace: Path, executor: str) -> None:
    """Sets the executor, "EXECUTOR WORKERS"."""
    kind, workers = executor.split()
    set_param("sampling", {"executor": kind, "workers": int(workers)})(workspace)


RISING = {  # after every iteration but the first, because no reward rises by 10
    "first": 1.0,
    "last": 1.2,
    "step": 0.1,
    "iterations": 1,
    "tolerance": 10.0,
    "cooldown": 0,
    "scored_at": None,
}


def online(
    finished: Path,
    target: Path,
    *,
    objective: object = CORRECTED,
    temperature: object = 1.0,
    selection: Sequence[object] = (),
    **training: object,
) -> Path:
    """Returns a workspace with the first rollouts and rewards of a round of iterations."""
    workspace = copy_for_stages(finished, target)
    changes = {
        "iterations_per_round": ITERATIONS,
        "updates_per_iteration": 1,
        "updates_per_checkpoint": 2,
        **training,
    }
    for key, value in changes.items():
        set_param(f"arms.uniform.training.{key}", value)(workspace)
    set_param("arms.uniform.objective", objective)(workspace)
    set_param("arms.uniform.selection", list(selection))(workspace)
    set_param("reward.overlong_penalty", OVERLONG)(workspace)
    set_param("arms.uniform.sampling.rollouts_per_batch", 8)(workspace)
    set_param("arms.uniform.sampling.temperature", temperature)(workspace)
    run(workspace, "rollout")
    run(workspace, "score")
    return workspace


def command_of(workspace: Path, stage: str) -> str:
    return str(locked_stages(workspace)[f"{stage}@{NAME}"]["cmd"])


def run(workspace: Path, stage: str) -> None:
    done = run_stage(workspace, f"{stage}@{NAME}", command_of(workspace, stage))
    assert done.code == 0, done.stderr


def trained(workspace: Path) -> dict[str, dict[str, bytes]]:
    return {name: contents(workspace / name) for name in OUTPUTS}


def train_under(workspace: Path, executor: str) -> dict[str, dict[str, bytes]]:
    """Returns the outputs of train@ under an executor."""
    set_executor(workspace, executor)
    run(workspace, "train")
    assert not (workspace / ".work" / f"train@{NAME}").exists()
    return trained(workspace)


LONG = pytest.mark.long


# Rounds whose staleness is 0: also those of a rising temperature below.
@pytest.fixture(scope="module", params=[pytest.param(0, marks=LONG), 1])
def made(
    request: pytest.FixtureRequest, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """Returns a workspace in which the round was trained in one process, and its staleness."""
    target = tmp_path_factory.mktemp("iterations") / "made"
    workspace = online(finished, target, staleness=request.param, schedule=SCHEDULE)
    train_under(workspace, "local 1")
    return workspace, request.param


def test_the_judge_is_started_before_the_policy_is_loaded(
    made: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
):
    """Its process is a fork of train@, which would keep a copy of the policy."""
    workspace, _ = made
    others = multiprocessing.active_children()  # of tests before this one
    judges = list[Any]()

    def load_trainer(*arguments: object) -> None:
        judges.extend(each for each in multiprocessing.active_children() if each not in others)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "load_trainer", load_trainer)
    paths = [Path(each) for each in command_of(workspace, "train").split()[3:]]
    with chdir(workspace), pytest.raises(KeyboardInterrupt):
        train.main(Usage(), *paths)
    assert len(judges) == 1


@pytest.fixture(scope="module")
def supervised(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace with a judge that scores parts, trained in one process.

    Its texts are short, so that most have one part, the answer.
    """
    objective = ["sum_later_part_scores", "average_over_rollouts", "clip_surrogate"]
    target = tmp_path_factory.mktemp("supervised") / "workspace"
    workspace = online(finished, target, objective=objective, iterations_per_round=2)
    settings = {"weight": 0.0, "normalize": "none", "model": None, "score_range": None}
    judges = [{"judge": each, **settings} for each in ("reasoning_gym", "worked_solution")]
    set_param("reward.judges", [{**judges[0], "weight": 1.0}, judges[1]])(workspace)
    set_param("task.notation", "steps")(workspace)
    run(workspace, "score")
    train_under(workspace, "local 1")
    return workspace


def test_scores_of_parts_reach_the_credit_of_first_and_later_iterations(supervised: Path):
    """At the first step, the advantage is the sum of the z-scores of all parts of a rollout."""
    training = supervised / OUTPUTS[1]
    first = supervised / "artifacts" / "rewards" / f"{NAME}.parquet"
    (later,) = iterations(supervised)
    for path, record in ((first, training), (later / "rewards.parquet", later)):
        rewards = pd.read_parquet(path)
        parts = rewards.assign(part=rewards["parts"].map(json.loads)).explode("part").dropna()
        score = parts["part"].map(lambda part: part[1])
        groups = score.groupby(parts["prompt_id"])
        spread = groups.transform("std", ddof=0)
        z_score = ((score - groups.transform("mean")) / (spread + 1e-6)).where(spread > 0, 0.0)
        expected = z_score.groupby(parts["rollout_id"]).sum()
        credit = pd.read_parquet(record / "credit.parquet").set_index("rollout_id")["advantage"]
        assert credit.any()
        for rollout, advantage in credit.items():
            assert advantage == pytest.approx(expected.get(rollout, 0.0), abs=1e-4)


def test_a_profile_counts_the_outcomes_of_the_first_of_several_judges(supervised: Path):
    path = supervised / "artifacts" / "profile" / "prompts.parquet"
    before = path.read_bytes()
    path.unlink()
    done = run_stage(supervised, "profile", str(locked_stages(supervised)["profile"]["cmd"]))
    assert done.code == 0, done.stderr
    assert path.read_bytes() == before


@pytest.mark.long
def test_scores_of_parts_train_the_same_bytes_in_two_processes(supervised: Path):
    in_one = trained(supervised)
    assert train_under(supervised, "processes 2") == in_one


def iterations(workspace: Path) -> list[Path]:
    return sorted((workspace / OUTPUTS[1]).glob("iteration-*"))


def test_every_iteration_is_stored_as_the_first_and_samples_its_own_prompts(made: tuple[Path, int]):
    workspace, _ = made
    first = workspace / "artifacts" / "rollouts" / NAME
    tables = [read_batch(first).table]
    tables += [read_batch(each / "rollouts").table for each in iterations(workspace)]
    assert len(tables) == ITERATIONS
    prompts = [set(each["prompt_id"]) for each in tables]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == 16
    for place, table in zip(iterations(workspace), tables[1:], strict=True):
        assert set(pd.read_parquet(place / "rewards.parquet")["rollout_id"]) == {
            *table["rollout_id"]
        }
        assert set(pd.read_parquet(place / "credit.parquet")["rollout_id"]) <= {
            *table["rollout_id"]
        }
    updates = pd.read_csv(workspace / OUTPUTS[1] / "updates.csv")
    assert updates["update"].tolist() == list(range(ITERATIONS))
    assert updates["rollouts"].tolist() == [len(each) for each in tables]
    with chdir(workspace):
        training = read_params().find_arm("uniform").training
    rate = build_learning_rate(training)
    assert rate is not None
    assert updates["learning_rate"].tolist() == pytest.approx([*map(rate, range(ITERATIONS))])


def test_costs_of_the_iterations_add_up(made: tuple[Path, int]):
    workspace, _ = made
    summary = read_json(workspace / OUTPUTS[1] / "summary.json")
    later = [Cost(**read_json(each / "rollouts" / "cost.json")) for each in iterations(workspace)]
    assert Cost(**summary["sampling_cost"]) == sum(later, Cost())
    first = Cost(**read_json(workspace / "artifacts" / "rollouts" / NAME / "cost.json"))
    state = read_state(workspace / OUTPUTS[0], NAME)
    assert state.cost == first + Cost(**summary["cost"])
    assert state.updates == summary["updates"] == ITERATIONS


def test_staleness_is_the_number_of_iterations_between_sampling_and_training(
    made: tuple[Path, int],
):
    """The second iteration is drawn by the round's first weights if and only if it is stale."""
    workspace, staleness = made
    with chdir(workspace):
        params = read_params()
    base = workspace / "artifacts" / "policies" / "base"
    policy = load_policy(params, base=base, directory=base, draws=draws_of_round(params, NAME))
    second = read_batch(iterations(workspace)[0] / "rollouts")
    group = torch.tensor(second.table["group"].to_numpy())
    trajectory, behavior_logp = policy.unpack(second.tensors, group)
    with torch.no_grad():
        distance = (policy.log_prob(trajectory) - behavior_logp)[trajectory.mask].abs().max()
    assert (distance < 1e-4) == bool(staleness)
    drift = read_json(workspace / OUTPUTS[1] / "summary.json")["drift_max"]
    assert (drift < 1e-4) == (not staleness)


# The tests of kills below compare rounds of one worker with those of one process.
@pytest.mark.parametrize("executor", ["processes 2", pytest.param("processes 1", marks=LONG)])
def test_workers_that_receive_weights_in_memory_write_the_bytes_of_one_process(
    made: tuple[Path, int], tmp_path: Path, executor: str
):
    workspace, staleness = made
    other = copy_for_stages(workspace, tmp_path / "other")
    assert train_under(other, executor) == trained(workspace)
    spans = timeline(Usage(**read_json(other / USAGE / f"train@{NAME}.json")))
    updates = [each for each in spans if each.activity == "update"]
    samples = [each for each in spans if each.activity == "sampling"]
    assert len(updates) == ITERATIONS
    assert len(samples) == ITERATIONS - 1
    overlap = [(u, s) for u in updates for s in samples if u.start < s.end and s.start < u.end]
    assert bool(overlap) == bool(staleness)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
def test_three_workers_write_the_bytes_of_one_process(
    finished: Path, tmp_path: Path, staleness: int
):
    """An iteration has four batches, so that all three sample."""
    four = [{"visit_prompts": {"prompts": 4}}]
    workspace = online(finished, tmp_path / "one", selection=four, staleness=staleness)
    other = copy_for_stages(workspace, tmp_path / "three")
    expected = train_under(workspace, "local 1")
    assert len(iterations(workspace)) == ITERATIONS - 1
    set_executor(other, "processes 3")
    stage = start_stage(other, f"train@{NAME}", command_of(other, "train"))
    most = 0
    while stage.is_alive():
        most = max(most, len(workers_of(stage.pid)))
        time.sleep(0.05)
    assert stage.exitcode == 0, (other / "stderr.log").read_text()
    assert most == 3
    assert trained(other) == expected


# test_online_allocation.py kills a round that is not stale.
def test_a_killed_round_goes_on_to_the_same_bytes(made: tuple[Path, int], tmp_path: Path):
    goes_on_after_a_kill(made, tmp_path, "local 1")


@pytest.mark.long  # the test of a rising temperature kills a round on a worker
def test_a_killed_round_goes_on_to_the_same_bytes_on_workers(
    made: tuple[Path, int], tmp_path: Path
):
    goes_on_after_a_kill(made, tmp_path, "processes 2")


def goes_on_after_a_kill(made: tuple[Path, int], tmp_path: Path, executor: str) -> None:
    """Kills a copy of a round after some of its iterations and asserts that it then goes on."""
    workspace, staleness = made
    killed = copy_for_stages(workspace, tmp_path / "killed")
    set_executor(killed, executor)
    fewest = random.Random(f"{executor} {staleness}").randint(1, ITERATIONS - 3)
    left = kill_after(killed, fewest)
    assert psutil.wait_procs(left, timeout=10)[1] == []
    assert train_under(killed, executor) == trained(workspace)


def rewarded(workspace: Path) -> list[Path]:
    """Returns the iterations in the scratch of train@ whose rollouts are judged."""
    return list(workspace.glob(f".work/train@{NAME}/*/iteration-*/rewards.parquet"))


def kill_after(workspace: Path, fewest: int) -> list[psutil.Process]:
    """Kills train@ once so many iterations are judged; returns the processes that it had started.

    They are listed once: listing them at every look takes two thirds of a core.
    """
    stage = start_stage(workspace, f"train@{NAME}", command_of(workspace, "train"))
    started: list[psutil.Process] = []
    while not started or len(rewarded(workspace)) < fewest:
        assert stage.is_alive(), (workspace / "stderr.log").read_text()
        if not started and rewarded(workspace):
            started = psutil.Process(stage.pid).children(recursive=True)
            assert started  # the judge's process, and the workers
        time.sleep(0.01)
    stage.kill()
    stage.join()
    return started


@pytest.fixture(scope="module")
def risen(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workspace with a round whose temperature rises, trained in one process."""
    target = tmp_path_factory.mktemp("rising") / "risen"
    workspace = online(finished, target, temperature=RISING)
    train_under(workspace, "local 1")
    return workspace


def test_a_rising_temperature_is_recorded_and_its_log_probs_are_those_of_sampling(risen: Path):
    training = risen / OUTPUTS[1]
    records = [read_json(each / "sampling.json") for each in (training, *iterations(risen))]
    used = [1.0, 1.0, 1.1, *[1.2] * (ITERATIONS - 3)]
    assert [each["temperature"] for each in records] == pytest.approx(used)
    assert [each["scored_at"] for each in records] == pytest.approx(used)
    assert read_json(training / "summary.json")["drift_max"] < 1e-4
    assert read_state(risen / OUTPUTS[0], NAME).selection_state["temperature"]["raises"] == 2


@pytest.mark.long
@pytest.mark.parametrize("executor", ["local 1", "processes 1"])
def test_a_rising_temperature_is_the_same_on_a_worker_and_after_a_kill(
    risen: Path, tmp_path: Path, executor: str
):
    killed = copy_for_stages(risen, tmp_path / "killed")
    set_executor(killed, executor)
    left = kill_after(killed, ITERATIONS - 3)
    assert psutil.wait_procs(left, timeout=10)[1] == []
    assert train_under(killed, executor) == trained(risen)


def test_the_next_round_goes_on_at_the_temperature_that_was_reached(risen: Path, tmp_path: Path):
    """Log-probs of its first rollouts are those of the round's policy at 1.2, and not at 1."""
    workspace, name = copy_for_stages(risen, tmp_path / "next"), "uniform-2"
    set_param(f"rounds.{name}", {"arm": "uniform", "start": NAME, "phase": 1})(workspace)
    base_twice, of_round = "artifacts/policies/base " * 2, f"artifacts/policies/{NAME} "
    command = command_of(workspace, "rollout").replace(
        base_twice, f"artifacts/policies/base {of_round}"
    )
    command = command.replace(f"artifacts/rollouts/{NAME}", f"artifacts/rollouts/{name}")
    done = run_stage(workspace, f"rollout@{name}", command)
    assert done.code == 0, done.stderr
    sampled = read_batch(workspace / "artifacts" / "rollouts" / name)
    with chdir(workspace):
        params = read_params()
    base, directory = workspace / "artifacts/policies/base", workspace / OUTPUTS[0]
    group = torch.tensor(sampled.table["group"].to_numpy())
    distances = []
    for level in (0, 2):
        draws = draws_of_round(params, name, level=level)
        policy = load_policy(params, base=base, directory=directory, draws=draws)
        trajectory, behavior_logp = policy.unpack(sampled.tensors, group)
        with torch.no_grad():
            distance = (policy.log_prob(trajectory) - behavior_logp)[trajectory.mask]
        distances.append(float(distance.abs().max()))
    assert distances[0] > 1e-2
    assert distances[1] < 1e-4


def test_log_probs_at_another_temperature_leave_a_ratio_to_the_base_without_drift(
    finished: Path, tmp_path: Path
):
    """The published method: the drift of its ratio is 0, though sampling is at 1.2."""
    temperature = {**RISING, "first": 1.2, "scored_at": 1.0}
    workspace = online(
        finished,
        tmp_path / "published",
        objective=["translation_grpo"],
        temperature=temperature,
        updates_per_iteration=2,
        iterations_per_round=2,
    )
    train_under(workspace, "local 1")
    summary = read_json(workspace / OUTPUTS[1] / "summary.json")
    assert summary["drift_max"] < 1e-4
    assert read_json(workspace / OUTPUTS[1] / "sampling.json") == {
        "temperature": 1.2,
        "scored_at": 1.0,
    }


@pytest.mark.long  # tests/pipeline/test_ranks.py compares a round of one iteration
def test_two_ranks_end_with_the_losses_of_one_process(made: tuple[Path, int], tmp_path: Path):
    """They divide weights and microbatches; sums differ in the last bits."""
    workspace, _ = made
    ranks = copy_for_stages(workspace, tmp_path / "ranks")
    set_param("arms.uniform.training.ranks", 2)(ranks)
    train_under(ranks, "local 1")
    one, two = (pd.read_csv(each / OUTPUTS[1] / "updates.csv") for each in (workspace, ranks))
    for column in ("loss", "reward_mean", "grad_norm"):
        assert two[column].to_numpy() == pytest.approx(one[column].to_numpy(), abs=1e-4)


def test_rollouts_of_later_iterations_can_be_left_out(made: tuple[Path, int], tmp_path: Path):
    workspace, _ = made
    kept = copy_for_stages(workspace, tmp_path / "tables")
    set_param("arms.uniform.training.stored_rollouts", "tables")(kept)
    got, expected = train_under(kept, "local 1"), trained(workspace)
    left_out = {name for name in expected[OUTPUTS[1]] if name.endswith("tensors.safetensors")}
    assert len(left_out) == ITERATIONS - 1
    assert got[OUTPUTS[0]] == expected[OUTPUTS[0]]
    assert got[OUTPUTS[1]] == {
        name: each for name, each in expected[OUTPUTS[1]].items() if name not in left_out
    }


def test_more_iterations_than_prompts_are_refused(finished: Path, tmp_path: Path):
    workspace = copy_for_stages(finished, tmp_path / "many")
    set_param("arms.uniform.training.iterations_per_round", 17)(workspace)
    set_param("arms.uniform.training.updates_per_iteration", 1)(workspace)
    done = run_stage(workspace, f"rollout@{NAME}", command_of(workspace, "rollout"))
    assert done.code == 2
    assert done.stderr.strip() == (
        "params.yaml: arms.uniform.training.iterations_per_round: must be at most 16, the prompts "
        "of the phase, got 17: every iteration samples other prompts"
    )
