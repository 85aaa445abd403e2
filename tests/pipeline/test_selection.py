"""Rounds with a selection, through the stages, with a tiny policy."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import pandas as pd
import pytest

from grpo.modalities.shared.directories import PolicyState, read_state, save_base
from grpo.params.parameters import OverlongPenalty, read_params
from grpo.params.recorded import PLUGIN_MANIFESTS
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts import files
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import PROMPTS, write_table
from grpo.runtime.artifacts.usage import Usage
from grpo.wiring.allocation import inputs_of_selection
from stages import check, curriculum, profile, rollout, score, train
from tests.files import contents
from tests.modalities.tiny import seeded, tiny_policy
from tests.pipeline.processes import start_stage
from tests.pipeline.workspaces import ROOT, write_two_arms

NEEDED = Path("artifacts/profile_needed.json")
JUDGE = Path("artifacts/data/judge.json")
BASE, PROFILE = Path("artifacts/policies/base"), Path("artifacts/profile")
TRAIN = Path("artifacts/prompts/train.parquet")
SELECTIONS: dict[str, list] = {
    "skip": [{"skip_uniform_prompts": {"prompts": 8, "step": 0.25}}],
    "resample": [
        {"resample_uniform_groups": {"prompts": 5, "prompts_per_batch": 4, "max_batches": 4}}
    ],
    "reuse": ["reuse_profile_rollouts"],
    "plain": [],
}
ROUNDS = {
    "skip-1": ("skip", "base"),
    "skip-2": ("skip", "skip-1"),
    "skip-3": ("skip", "skip-2"),
    "resample-1": ("resample", "base"),
    "reuse-1": ("reuse", "base"),
    "reuse-2": ("reuse", "reuse-1"),
    "plain-1": ("plain", "base"),
}
RUN = ("skip-1", "skip-2", "skip-3", "resample-1", "reuse-1", "plain-1")
replace = files._replace


class Interrupted(Exception):
    """Simulates a kill within a process."""


def write_params() -> None:
    """Writes arms that differ in their selection; a first character is the answer."""
    path = Path("params.yaml")
    write_two_arms(path)
    params = parse_yaml(path.read_text())
    arm = params["arms"]["uniform"]
    arm["training"]["updates_per_iteration"] = 2
    arm["sampling"]["rollouts_per_batch"] = 8
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 16}},
        {"fix_group_size": {"rollouts": 4}},
    ]
    params["reward"] |= {"answer_pattern": "^(.)", "unfinished_penalty": 0.5}
    params["profile"] = {"when": "read", "rollouts_per_prompt": 6, "rollouts_per_batch": 32}
    params["arms"] = {name: {**arm, "selection": each} for name, each in SELECTIONS.items()}
    params["rounds"] = {
        name: {"arm": arm, "start": start, "phase": 1} for name, (arm, start) in ROUNDS.items()
    }
    path.write_text(dump_yaml(params))


def write_inputs() -> None:
    """Writes a tiny base, and prompts of which a third is solved now and then, the others never."""
    policy = tiny_policy()
    save_base(BASE, policy.model, policy.tokenizer)
    texts = [f"{each}=" for each in range(20)]
    trajectory, _ = policy.sample(texts, group_sizes=[8] * 20, generator=seeded(3))
    written = pd.Series(policy.decode(trajectory)).str.slice(0, 1).to_numpy().reshape(20, 8)
    rows = []
    for index, (text, firsts) in enumerate(zip(texts, written)):
        seen = [each for each in firsts if each.isprintable() and each.strip()]
        answer = seen[0] if seen and index % 3 else "none"
        entry = json.dumps({"answer": answer})
        rows.append((f"p{index:02d}", "letter_counting", text, answer, entry))
    write_table(pd.DataFrame(rows, columns=list(PROMPTS.columns)), TRAIN, PROMPTS)


def paths_of(name: str) -> dict[str, Path]:
    start = ROUNDS[name][1]
    return {
        "start": Path(f"artifacts/policies/{start}"),
        "curriculum": Path(f"artifacts/curricula/{ROUNDS[name][0]}.parquet"),
        "rollouts": Path(f"artifacts/rollouts/{name}"),
        "rewards": Path(f"artifacts/rewards/{name}.parquet"),
        "policy": Path(f"artifacts/policies/{name}"),
        "training": Path(f"artifacts/training/{name}"),
    }


def draw(name: str) -> None:
    at = paths_of(name)
    inputs = (JUDGE, BASE, at["start"], TRAIN, at["curriculum"], PROFILE / "rollouts")
    rollout.main(Usage(), *inputs, at["rollouts"])


def judge(name: str) -> None:
    at = paths_of(name)
    score.main(Usage(), JUDGE, TRAIN, at["rollouts"], at["rewards"])


def update(name: str) -> None:
    at = paths_of(name)
    inputs = (JUDGE, BASE, at["start"], TRAIN, at["curriculum"], at["rollouts"], at["rewards"])
    train.main(Usage(), *inputs, at["policy"], at["training"])


STAGES = (draw, judge, update)


def run(name: str) -> None:
    """Runs a round's stages in this process."""
    for stage in STAGES:
        stage(name)


@pytest.fixture(scope="module")
def run_of_rounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a workspace, as the current directory, in which the rounds ran."""
    workspace = tmp_path_factory.mktemp("rounds")
    for folder in ("grpo", "plugins", "stages"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, workspace / folder, ignore=ignored)
    with chdir(workspace):
        write_params()
        write_inputs()
        check.main(
            Usage(), Path("params.yaml"), Path("data"), NEEDED, JUDGE.parent, PLUGIN_MANIFESTS
        )
        profile.main(Usage(), NEEDED, JUDGE, BASE, TRAIN, PROFILE)
        for arm in SELECTIONS:
            out = Path(f"artifacts/curricula/{arm}.parquet")
            profiled = PROFILE / "prompts.parquet", PROFILE / "rollouts"
            curriculum.main(Usage(), TRAIN, *profiled, out, out.with_suffix(".json"))
        for name in RUN:
            run(name)
        yield workspace


def counts(name: str) -> dict[str, float]:
    return read_json(paths_of(name)["rollouts"] / "summary.json")["selection"]


def table(name: str) -> pd.DataFrame:
    at = paths_of(name)
    rollouts = pd.read_parquet(at["rollouts"] / "table.parquet")
    return rollouts.merge(pd.read_parquet(at["rewards"]), on=["rollout_id", "prompt_id"])


def state_of(name: str) -> PolicyState:
    return read_state(Path("artifacts/policies") / name, name)


def test_a_skipping_arm_learns_streaks_of_raw_outcomes_in_its_policy(run_of_rounds: Path):
    """The rewards of these rounds differ within groups of one outcome: they are shaped."""
    history = state_of("skip-1").selection_state
    groups = table("skip-1").groupby("prompt_id")["outcome"]
    low, high = groups.min(), groups.max()
    assert history["hard_streak"] == dict.fromkeys(high[high == 0].index, 1)
    assert history["easy_streak"] == dict.fromkeys(low[low == 1].index, 1)
    assert len(history["hard_streak"]) > 0
    assert set(history["visits"]) == set(groups.groups)


def test_prompts_come_in_epochs_and_hard_ones_are_passed_over_later(run_of_rounds: Path):
    first, second = set(table("skip-1")["prompt_id"]), set(table("skip-2")["prompt_id"])
    assert len(first | second) == 16  # the pool, once
    assert counts("skip-1")["skipped"] == counts("skip-2")["skipped"] == 0
    assert counts("skip-3")["skipped"] > 0
    visits = state_of("skip-3").selection_state["visits"]
    skipped = read_json(Path("artifacts/rollouts/skip-3/passed.json"))
    assert {visits[each] for each in skipped} == {2}
    streaks = state_of("skip-2").selection_state
    assert set(skipped) <= {*streaks["hard_streak"], *streaks["easy_streak"]}


def test_p_is_carried_and_adapted_once_prompts_come_again(run_of_rounds: Path):
    bases = [state_of(f"skip-{n}").selection_state["keep_base"]
             for n in (1, 2, 3)]  # fmt: skip
    assert bases[0] == bases[1] == {"easy": 0.5, "hard": 0.5}
    assert bases[2] != bases[1]


def test_a_resampling_round_trains_on_mixed_groups_and_pays_for_the_others(run_of_rounds: Path):
    groups = table("resample-1").groupby("prompt_id")["outcome"]
    assert (groups.min() < groups.max()).all()
    drawn, summary = counts("resample-1"), paths_of("resample-1")["rollouts"] / "summary.json"
    assert drawn["oversampling_factor"] == drawn["sampled"] / drawn["kept"] > 1
    assert read_json(summary)["cost"]["sampled_steps"] > table("resample-1")["steps"].sum()
    cost = state_of("resample-1").cost
    assert cost.sampled_steps == read_json(summary)["cost"]["sampled_steps"]
    visits = state_of("resample-1").selection_state["visits"]
    assert len(visits) == drawn["sampled"]


def test_a_first_round_is_trained_on_the_profiles_rollouts_for_free(run_of_rounds: Path):
    stored = pd.read_parquet(PROFILE / "rollouts" / "table.parquet").set_index("rollout_id")
    reused = table("reuse-1").set_index("rollout_id")
    assert (reused["text"] == stored.loc[reused.index, "text"]).all()
    assert (reused.groupby("prompt_id").size() == 4).all()
    state = state_of("reuse-1")
    assert state.cost.sampled_steps == 0
    assert counts("reuse-1")["reused"] == 16
    drift = read_json(Path("artifacts/training/reuse-1/summary.json"))["drift_max"]
    assert drift < 1e-4  # they are the base's own: ratios start at 1


def test_a_later_round_samples_again(run_of_rounds: Path):
    draw("reuse-2")
    assert counts("reuse-2")["sampled"] == 16
    assert counts("reuse-2")["reused"] == 0


def test_a_plain_arm_leaves_no_trace_of_a_selection(run_of_rounds: Path):
    assert "selection" not in read_json(paths_of("plain-1")["rollouts"] / "summary.json")
    assert not (paths_of("plain-1")["rollouts"] / "passed.json").exists()
    assert "selection_state" not in read_json(Path("artifacts/policies/plain-1/state.json"))


@pytest.mark.parametrize("arm", sorted(SELECTIONS))
def test_an_arm_depends_on_judge_and_profile_only_if_its_selection_reads_them(
    run_of_rounds: Path, arm: str
):
    params = read_params()
    stricter = params.model_copy(
        update={"reward": params.reward.model_copy(update={"threshold": 0.25})}
    )
    shaped = params.model_copy(
        update={
            "reward": params.reward.model_copy(
                update={
                    "unfinished_penalty": 0.25,
                    "overlong_penalty": OverlongPenalty(max_steps=4, buffer_steps=2, penalty=1.0),
                }
            )
        }
    )
    names = str(SELECTIONS[arm])
    before = inputs_of_selection(params, arm, PROFILE / "rollouts")
    assert before == read_json(Path(f"artifacts/curricula/{arm}.json"))
    assert before == inputs_of_selection(shaped, arm, PROFILE / "rollouts")
    judged = inputs_of_selection(stricter, arm, PROFILE / "rollouts")
    assert (judged != before) is ("resample_uniform_groups" in names)
    other = inputs_of_selection(params, arm, PROFILE)
    assert (other != before) is ("reuse_profile_rollouts" in names)


@pytest.mark.parametrize(
    ("name", "stage"), [("skip-3", draw), ("resample-1", draw), ("reuse-1", draw), ("skip-3", run)]
)
def test_a_round_that_runs_again_writes_the_same_bytes(
    run_of_rounds: Path, name: str, stage: Callable[[str], None]
):
    before = contents(Path("artifacts"))
    stage(name)
    assert contents(Path("artifacts")) == before


@pytest.mark.long
@pytest.mark.parametrize("name", ["skip-3", "skip-1", "resample-1"])
def test_a_round_interrupted_before_every_write_ends_with_the_same_bytes(
    run_of_rounds: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Each attempt gets one write further than the one before, from what that one has left."""
    before = contents(Path("artifacts"))
    for stage, fewest in zip(STAGES, (2, 1, 4)):
        assert attempts(stage, name, monkeypatch) >= fewest
    assert contents(Path("artifacts")) == before


def attempts(stage: Callable[[str], None], name: str, patch: pytest.MonkeyPatch) -> int:
    """Runs a stage until it ends, interrupted before its first write, its second, and so on."""
    for allowed in count():
        with patch.context() as patched:
            patched.setattr(files, "_replace", partial(replace_until, iter(range(allowed))))
            with suppress(Interrupted):
                stage(name)
                break
    return allowed


def replace_until(left: Iterator[int], source: Path, target: Path) -> None:
    """Does what `files._replace` does, as often as something is left."""
    if next(left, None) is None:
        raise Interrupted
    replace(source, target)


def test_a_resampling_round_killed_between_its_batches_goes_on_to_the_same_bytes(
    run_of_rounds: Path,
):
    before = contents(Path("artifacts/rollouts/resample-1"))
    at = paths_of("resample-1")
    paths = [
        JUDGE,
        BASE,
        at["start"],
        TRAIN,
        at["curriculum"],
        PROFILE / "rollouts",
        at["rollouts"],
    ]
    command = f"python -m stages.rollout {' '.join(map(str, paths))}"
    shutil.rmtree(at["rollouts"])
    for moment in ("part-00000/judged/shard-00000", "part-00001/batch-00000/cost.json"):
        process = start_stage(run_of_rounds, "rollout@resample-1", command)
        kill_at(process, run_of_rounds, f".work/rollout@resample-1/*/{moment}")
        assert not at["rollouts"].exists()
    process = start_stage(run_of_rounds, "rollout@resample-1", command)
    process.join(60)
    assert process.exitcode == 0
    assert contents(at["rollouts"]) == before


def kill_at(process: BaseProcess, workspace: Path, pattern: str) -> None:
    """Kills a process as soon as a path matches the pattern."""
    deadline = time.monotonic() + 60
    while not any(workspace.glob(pattern)):
        assert process.exitcode is None, pattern
        assert time.monotonic() < deadline, pattern
        time.sleep(0.0005)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
