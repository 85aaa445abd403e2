"""Rounds of iterations whose prompts and group sizes are allocated online, through the stages."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from grpo.advice.left_out import PLANNED, TRAINED, compare_left_out
from grpo.allocation.online import FAILURES, STEPS, SUCCESSES
from grpo.allocation.selection import VISITS
from grpo.modalities.shared.directories import PolicyState, read_state
from grpo.modalities.tokens import costs
from grpo.modalities.tokens.costs import TokenCostModel
from grpo.params.parameters import read_params
from grpo.params.recorded import PLUGIN_MANIFESTS
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import CURRICULUM, REWARDS, read_table
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.rollouts import read_allocation
from grpo.wiring.policies import draws_of_round, load_policy
from grpo.wiring.prices import load_cost_model
from grpo.wiring.training_costs import training_costs
from stages import check, curriculum, profile, rollout, score, train
from tests.files import contents
from tests.pipeline.processes import run_stage, start_stage
from tests.pipeline.test_selection import BASE, JUDGE, NEEDED, PROFILE, TRAIN, write_inputs
from tests.pipeline.workspaces import ROOT, copy_for_stages, write_two_arms

ITERATIONS = 3
BUDGET = 3e7  # FLOPs
PATIENCE = 300.0  # seconds: workers import torch on a busy machine
SIGNAL = {"allocate_by_signal": {"budget": BUDGET}}
FIXED = [{"fix_group_size": {"rollouts": 4}}]
# Selection and the curriculum's step of group sizes, by arm.
ARMS: dict[str, tuple[list, list]] = {
    "signal": ([SIGNAL], []),
    "ht": ([{"allocate_by_signal": {"budget": BUDGET, "draws": "optimism", "weights": "ht"}}], []),
    "seconds": (
        [
            {
                "allocate_by_signal": {
                    "budget": 1.0,
                    "seconds_per_sampled_step": 0.01,
                    "seconds_per_trained_step": 0.005,
                }
            }
        ],
        [],
    ),
    "profiled": ([SIGNAL, "reuse_profile_rollouts"], []),
    "near": ([{"sample_prompts_near_rate": {"prompts": 6}}], FIXED),
    "knapsack": ([{"size_groups_by_knapsack": {"prompts": 6, "rollouts": 4}}], []),
}
LONG = pytest.mark.long
ROUNDS = {
    "signal-1": ("signal", "base"),
    "signal-2": ("signal", "signal-1"),
    **{f"{arm}-1": (arm, "base") for arm in ("ht", "seconds", "profiled", "near", "knapsack")},
}
of_each_round = pytest.mark.parametrize(
    "name",
    [
        *("signal-1", "signal-2"),
        *(pytest.param(name, marks=LONG) for name in ROUNDS if not name.startswith("signal")),
    ],
)


def write_params() -> None:
    """Writes arms that differ in their selection; a first character is the answer."""
    path = Path("params.yaml")
    write_two_arms(path)
    params = parse_yaml(path.read_text())
    arm = params["arms"]["uniform"]
    arm["objective"] = ["rloo", "drop_uniform_groups"]
    arm["training"] |= {
        "iterations_per_round": ITERATIONS,
        "updates_per_iteration": 1,
        "updates_per_checkpoint": 1,
    }
    arm["sampling"]["rollouts_per_batch"] = 8
    phases = {"split_at_random": {"phases": 1, "prompts_per_phase": 16}}
    params["reward"] |= {"answer_pattern": "^(.)", "unfinished_penalty": 0.0}
    params["profile"] = {"when": "read", "rollouts_per_prompt": 6, "rollouts_per_batch": 32}
    params["arms"] = {
        name: {**arm, "selection": selection, "curriculum": [phases, *sizes]}
        for name, (selection, sizes) in ARMS.items()
    }
    params["rounds"] = {
        name: {"arm": arm, "start": start, "phase": 1} for name, (arm, start) in ROUNDS.items()
    }
    path.write_text(dump_yaml(params))


def paths_of(name: str) -> dict[str, list[Path]]:
    """Returns the arguments of a round's stages."""
    arm, start = ROUNDS[name]
    policy, plan = Path(f"artifacts/policies/{start}"), Path(f"artifacts/curricula/{arm}.parquet")
    drawn, judged = Path(f"artifacts/rollouts/{name}"), Path(f"artifacts/rewards/{name}.parquet")
    return {
        "rollout": [JUDGE, BASE, policy, TRAIN, plan, PROFILE / "rollouts", drawn],
        "score": [JUDGE, TRAIN, drawn, judged],
        "train": [
            *(JUDGE, BASE, policy, TRAIN, plan, drawn, judged),
            *(Path(f"artifacts/policies/{name}"), Path(f"artifacts/training/{name}")),
        ],
    }


@pytest.fixture(scope="module")
def finished_rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a workspace, as the current directory, in which a chain of rounds ran."""
    workspace = tmp_path_factory.mktemp("online")
    for folder in ("grpo", "plugins", "stages", "data"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, workspace / folder, ignore=ignored)
    with chdir(workspace):
        write_params()
        write_inputs()
        check.main(
            Usage(), Path("params.yaml"), Path("data"), NEEDED, JUDGE.parent, PLUGIN_MANIFESTS
        )
        profile.main(Usage(), NEEDED, JUDGE, BASE, TRAIN, PROFILE)
        for arm in ARMS:
            out = Path(f"artifacts/curricula/{arm}.parquet")
            profiled = PROFILE / "prompts.parquet", PROFILE / "rollouts"
            curriculum.main(Usage(), TRAIN, *profiled, out, out.with_suffix(".json"))
        for name in ("signal-1", "signal-2"):
            run_round(name)
        yield workspace


def run_round(name: str) -> None:
    """Runs the stages of a round, unless they have run."""
    if not Path(f"artifacts/policies/{name}").exists():
        for stage, module in (("rollout", rollout), ("score", score), ("train", train)):
            module.main(Usage(), *paths_of(name)[stage])


def state_of(name: str) -> PolicyState:
    return read_state(Path("artifacts/policies") / name, name)


def iteration_tables(name: str) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Returns the allocation, and the rollouts with their outcomes, of each iteration."""
    run_round(name)
    found = []
    for each in iterations_of(Path("artifacts"), name):
        judged = pd.read_parquet(each.rewards)
        rollouts = pd.read_parquet(each.table).merge(judged, on=["rollout_id", "prompt_id"])
        allocation = read_allocation(each.rollouts)
        assert allocation is not None
        found.append((allocation.set_index("prompt_id"), rollouts))
    return found


def records(name: str) -> list[dict]:
    run_round(name)
    return [
        read_json(each.record / "allocation.json")
        for each in iterations_of(Path("artifacts"), name)
    ]


@of_each_round
def test_every_iteration_samples_what_was_allocated(finished_rounds: Path, name: str):
    for allocation, rollouts in iteration_tables(name):
        sizes = allocation["rollouts"]
        assert len(allocation) == 16
        drawn = rollouts.groupby("prompt_id").size()
        assert drawn.to_dict() == sizes[sizes > 0].to_dict()
        assert sizes[sizes > 0].min() >= 2


@pytest.mark.parametrize("name", ["signal-1", "signal-2", pytest.param("seconds-1", marks=LONG)])
def test_the_expected_cost_of_every_iteration_is_within_the_budget(
    finished_rounds: Path, name: str
):
    budget = 1.0 if name.startswith("seconds") else BUDGET
    for allocation, _ in iteration_tables(name):
        assert 0.7 * budget < allocation["cost"].sum() <= budget


def test_training_counts_costs_by_its_own_policy_and_loads_no_second_one(
    finished_rounds: Path, monkeypatch: pytest.MonkeyPatch
):
    params = read_params()
    draws = draws_of_round(params, "signal-1")
    trained = Path("artifacts/policies/signal-1")
    policy = load_policy(params, base=BASE, directory=trained, draws=draws)
    loaded = load_cost_model(params, BASE)
    monkeypatch.delattr(costs, "load_token_policy")
    own = load_cost_model(params, BASE, policy)
    assert isinstance(own, TokenCostModel)
    assert isinstance(loaded, TokenCostModel)
    assert own.count_tokens(["ab", "c"]) == loaded.count_tokens(["ab", "c"])
    assert replace(own, count_tokens=list) == replace(loaded, count_tokens=list)


def test_the_posterior_is_that_of_earlier_outcomes_and_goes_to_the_next_round(
    finished_rounds: Path,
):
    expected: dict[str, list[float]] = {}
    for name in ("signal-1", "signal-2"):
        for _, rollouts in iteration_tables(name):
            expected = {each: [0.9 * n for n in counts] for each, counts in expected.items()}
            for prompt, group in rollouts.groupby("prompt_id")["outcome"]:
                before = expected.get(prompt, [0.0, 0.0])
                expected[prompt] = [before[0] + group.sum(), before[1] + (1 - group).sum()]
        state = state_of(name).selection_state
        assert state[SUCCESSES] == pytest.approx({k: v[0] for k, v in expected.items()})
        assert state[FAILURES] == pytest.approx({k: v[1] for k, v in expected.items()})
        assert set(state[STEPS]) == set(state[VISITS]) == set(expected)


def test_hard_prompts_are_drawn_less_once_they_are_known(finished_rounds: Path):
    """A third of the prompts is never solved."""
    (first, _), *_, (last, _) = iteration_tables("signal-1") + iteration_tables("signal-2")
    never = first.index.isin([f"p{each:02d}" for each in range(0, 20, 3)])
    shares = [each["rollouts"][never].sum() / each["rollouts"].sum() for each in (first, last)]
    assert shares[1] < shares[0]


def test_weights_are_the_inverse_of_the_chances_and_reach_the_credit(finished_rounds: Path):
    run_round("ht-1")
    for each in iterations_of(Path("artifacts"), "ht-1"):
        allocation = read_allocation(each.rollouts).set_index("prompt_id")
        taken = allocation[allocation["rollouts"] > 0]
        expected = len(taken) / (len(allocation) * taken["chance"])
        assert taken["weight"].to_numpy() == pytest.approx(expected.to_numpy())
        credit = pd.read_parquet(each.credit)
        kept = credit[credit["weight"] > 0]
        of_prompt = kept.groupby("prompt_id")["weight"].sum() * len(taken)
        assert of_prompt.to_numpy() == pytest.approx(taken["weight"][of_prompt.index].to_numpy())


def test_the_profile_is_the_first_data_and_its_outcomes_count_once(finished_rounds: Path):
    (allocation, rollouts), *_ = iteration_tables("profiled-1")
    stored = pd.read_parquet(PROFILE / "prompts.parquet").set_index("prompt_id")
    known = stored.loc[allocation.index]
    prior = allocation["alpha"] - known["successes"]
    assert prior.to_numpy() == pytest.approx(prior.iloc[0])
    assert rollouts.groupby("prompt_id").size().max() == 6  # it has no more
    summary = read_json(Path("artifacts/rollouts/profiled-1/summary.json"))
    assert summary["cost"]["sampled_steps"] == 0
    (_, (second, _), *_) = iteration_tables("profiled-1")
    total = second["alpha"] + second["beta"]  # nothing is added by the first iteration
    assert (total - total.min()).max() < 1e-6


@of_each_round
def test_the_record_compares_what_was_expected_with_what_happened(finished_rounds: Path, name: str):
    for record, (allocation, rollouts) in zip(records(name), iteration_tables(name), strict=True):
        groups = rollouts.groupby("prompt_id")["outcome"]
        assert record["mixed"] == pytest.approx((groups.min() < groups.max()).mean())
        assert record["groups"] == (allocation["rollouts"] > 0).sum()
        assert sum(each["share"] for each in record["bins"]) == pytest.approx(1)
        solved = sum((each["solved"] or 0) * each["rollouts"] for each in record["bins"])
        assert solved == pytest.approx(rollouts["outcome"].sum())
        if name == "near-1":
            assert "cost" not in record


def test_the_record_has_the_cost_of_what_was_drawn(finished_rounds: Path):
    first, *_, last = records("signal-1")
    assert first["never_drawn"] >= last["never_drawn"]
    assert last["cost_unit"] == "FLOPs"
    assert last["cost"] == pytest.approx(last["expected_cost"], rel=0.5)
    assert last["effective_sample_size"] == pytest.approx(last["groups"])
    assert records("ht-1")[0]["effective_sample_size"] <= records("ht-1")[0]["groups"]


def test_costs_of_the_records_are_those_of_the_round(finished_rounds: Path):
    summary = read_json(Path("artifacts/training/signal-1/summary.json"))
    sampled = read_json(Path("artifacts/rollouts/signal-1/summary.json"))["cost"]["flops"]
    total = sum(each["cost"] for each in records("signal-1"))
    assert total == pytest.approx(sampled + summary["cost"]["flops"])


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_rollouts_depend_on_the_objective_only_if_it_has_a_price(finished_rounds: Path, arm: str):
    """They depend on the second file of the curriculum, which then says what training costs."""
    stated = read_json(Path(f"artifacts/curricula/{arm}.json"))
    costs = training_costs(read_params(), arm)
    is_priced = arm in ("signal", "ht", "seconds", "profiled")
    found = {name: value for name, value in stated.items() if name in costs}
    assert found == (costs if is_priced else {})
    assert costs["drops_uniform"]


@pytest.mark.parametrize("executor", ["local 1", pytest.param("processes 2", marks=LONG)])
def test_a_killed_allocation_goes_on_to_the_same_bytes(
    finished_rounds: Path, tmp_path: Path, executor: str
):
    name = "signal-2"
    killed = copy_for_stages(finished_rounds, tmp_path / "killed", missing={"dvc.yaml", "dvc.lock"})
    set_executor(killed, executor)
    outputs = [f"artifacts/{each}/{name}" for each in ("rollouts", "policies", "training")]
    expected = {each: contents(finished_rounds / each) for each in outputs}
    for each in outputs:
        shutil.rmtree(killed / each)
    for stage in ("rollout", "train"):
        command = f"python -m stages.{stage} {' '.join(map(str, paths_of(name)[stage]))}"
        if stage == "train":
            kill_in_second_iteration(killed, command)
        done = run_stage(killed, f"{stage}@{name}", command, timeout_seconds=PATIENCE)
        assert done.code == 0, done.stderr
    assert {each: contents(killed / each) for each in outputs} == expected


def set_executor(workspace: Path, executor: str) -> None:
    kind, workers = executor.split()
    path = workspace / "params.yaml"
    params = parse_yaml(path.read_text())
    params["sampling"] = {"executor": kind, "workers": int(workers)}
    path.write_text(dump_yaml(params))


def kill_in_second_iteration(workspace: Path, command: str) -> None:
    process = start_stage(workspace, "train@signal-2", command)
    deadline = time.monotonic() + PATIENCE
    while not any(workspace.glob(".work/train@signal-2/*/iteration-0001/rewards.parquet")):
        assert process.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_left_out_prompts_are_those_that_no_iteration_sampled(finished_rounds: Path):
    artifacts, name = Path("artifacts"), "signal-1"
    sampled = {
        each
        for files in iterations_of(artifacts, name)
        for each in read_table(files.rewards, REWARDS)["prompt_id"]
    }
    first = set(read_table(iterations_of(artifacts, name)[0].rewards, REWARDS)["prompt_id"])
    assert first < sampled
    planned = set(read_table(Path("artifacts/curricula/signal.parquet"), CURRICULUM)["prompt_id"])
    told = compare_left_out(artifacts, read_params(), name, prompts=2, seed=0)
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| ")]
    counts = {row[0].removeprefix("| "): row[1] for row in rows}
    assert counts[TRAINED] == str(len(sampled))
    assert counts.get(PLANNED, "0") == str(len(planned - sampled))
