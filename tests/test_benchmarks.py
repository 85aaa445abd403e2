"""Benchmark summaries against closed forms on handmade curves, and how benchmarks run stages."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import (
    same_bytes,
    scaling_training,
    translation,
    translation_dates,
    translation_guards,
)
from benchmarks.allocation_chunks import combine_phases
from benchmarks.allocation_tokens import Point, summarize
from benchmarks.demo import (
    advice_errors,
    families_table,
    family_scores,
    judges_table,
    table,
    time_module,
)
from benchmarks.grounding_methods import MEASURES, gains_at_equal_flops
from benchmarks.peer_trl_run import __main__ as peer_trl_run
from benchmarks.peer_trl_run.judge import outcome_of
from benchmarks.peer_trl_run.processes import run_timed
from benchmarks.peer_trl_run.runs import by_family, update_ends
from benchmarks.peer_trl_run.settings import SIZES, order_of, params_of
from benchmarks.workspaces import PART_SECONDS, ROOT, round_seconds
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, read_yaml
from grpo.rewards.base import Task
from grpo.rewards.reasoning_gym import score_answer
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import PROMPTS, REWARDS, read_table, write_table
from grpo.sampling.judging import judge_text
from grpo.tasks.reasoning_gym import make_prompts
from tests.report.finished_run import write_later_iteration, write_prompts, write_round


def curve(*points: tuple[float, float]) -> list[Point]:
    """Returns the points of an arm: cost, and mean@k above a base of 0.25."""
    return [
        {
            "flops": cost,
            "cpu_seconds": 2 * cost,
            "sampled_steps": cost,
            "trained_steps": cost,
            "mean_at_k": 0.25 + gain,
            "greedy": 0.0,
            "pass_at_k": 0.5,
        }
        for cost, gain in points
    ]


def test_an_artifact_that_changed_came_or_went_differs():
    before = {"kept": "1", "changed": "1", "gone": "1"}
    after = {"kept": "1", "changed": "2", "new": "1"}
    found = same_bytes.compare(before, after)
    assert found == {"equal": 1, "differing": ["changed", "gone", "new"]}


def test_errors_of_advice_are_those_that_it_prints():
    advice = (
        "ARMS  all of plain -99 %\n\nWHAT HAPPENED  predicted / counted\n"
        "  all of plain  6 / 9  -33 %  6 / 9  -32 %  31 % / 48 %  -36 %  1 GFLOP / 2 GFLOP  -50 %\n"
        "\nSECONDS  predicted / measured\n"
        "  all of plain  14 s / 23 s  +39 %  22 s / 31 s  -30 %  39 s / 61 s   -7 %  -15 %\n"
    )
    assert advice_errors(advice) == {"plain": {"flops": -50, "seconds": -7}}
    without_seconds, _, _ = advice.partition("\nSECONDS")
    assert advice_errors(without_seconds) == {"plain": {"flops": -50}}
    assert advice_errors("ARMS  all of plain -99 %") == {}


@pytest.mark.long
def test_seeds_that_end_at_the_same_time_are_all_recorded(tmp_path: Path):
    """The summary takes seconds, in which another process may have written its seed."""
    code = (
        "import sys, time; from pathlib import Path; from benchmarks import seeds\n"
        "seeds.ROOT = seeds.RESULTS = Path(sys.argv.pop())\n"
        "seeds.record_seeds('b', {}, lambda seed: seed, lambda runs: time.sleep(0.5) or {})"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(seed), str(tmp_path)]) for seed in (1, 2)
    ]
    assert [each.wait() for each in running] == [0, 0]
    assert json.loads((tmp_path / "b.json").read_text())["runs"] == {"1": 1, "2": 2}


def test_gains_of_grounding_are_read_at_the_flops_that_every_arm_reaches():
    """At 8 FLOPs of an arm with points at 0, 5 and 10: 3/5 of the way between the last two."""

    def line(*points: tuple[float, float]) -> list[Point]:
        return [{"flops": flops, **dict.fromkeys(MEASURES, score)} for flops, score in points]

    run = {"grpo": line((0, 0.5), (8, 0.7)), "arm": line((0, 0.5), (5, 0.4), (10, 0.9))}
    found = gains_at_equal_flops(run)
    assert found["grpo"] == pytest.approx(dict.fromkeys(MEASURES, 0.2))
    assert found["arm"] == pytest.approx(dict.fromkeys(MEASURES, 0.2))


REFERENCE, DROPPING = curve((0, 0.0), (10, 0.125), (20, 0.25)), curve((0, 0.0), (10, 0.125))


def summarized(*arms: list[Point]) -> dict[str, Any]:
    """Returns the summary of an arm, given its curve of each seed."""
    runs = {
        str(seed): {"plain": REFERENCE, "drop_uniform": DROPPING, "arm": arm}
        for seed, arm in enumerate(arms)
    }
    found: dict[str, Any] = summarize(runs)["arm"]
    return found


def test_the_cost_to_reach_is_read_off_the_mean_curve():
    """Gains of 1/2 and 1/4 at cost 8 are 3/8 in the mean: 1/4 is reached at 16/3 of 20."""
    arm = summarized(curve((0, 0.0), (8, 0.5)), curve((0, 0.0), (8, 0.25)))
    for cost in ("flops", "cpu_seconds"):
        reached = arm[f"{cost}_to_reach"]
        assert reached["value"] == pytest.approx(16 / 3 / 20)
        assert reached["low"] == pytest.approx(4 / 20)
        assert reached["high"] == pytest.approx(8 / 20)
        assert arm[f"{cost}_of_reference"]["value"] == pytest.approx(8 / 20)
    assert arm["against_reference"]["value"] == pytest.approx(0.125)
    assert arm["last_rise"]["value"] == pytest.approx(0.375)


def test_each_target_has_its_own_cost():
    """plain ends at 0.5, 98 % of it are 0.49; drop_uniform has 1/8 above the base at cost 10."""
    arm = summarized(curve((0, 0.0), (8, 0.25)), curve((0, 0.0), (8, 0.25)))
    assert arm["flops_to_reach"]["value"] == pytest.approx(8 / 20)
    assert arm["flops_to_nearly_reach"]["value"] == pytest.approx(8 * 0.24 / 0.25 / 20)
    assert arm["flops_to_reach_dropping"]["value"] == pytest.approx(4 / 10)


def test_what_is_paid_before_the_first_update_counts():
    arm = summarized(curve((6, 0.0), (10, 0.25)))
    assert arm["flops_to_reach"]["value"] == pytest.approx(10 / 20)


def test_what_is_not_reached_has_no_cost():
    arm = summarized(curve((0, 0.0), (8, 0.2)), curve((0, 0.0), (8, 0.2)))
    assert arm["flops_to_reach"] == {"value": None, "low": None, "high": None}
    assert arm["flops_to_reach_dropping"]["value"] == pytest.approx(5 / 10)


def test_the_reference_reaches_itself_at_its_whole_cost():
    summary = summarized(REFERENCE, REFERENCE, REFERENCE)
    assert set(summary["flops_to_reach"].values()) == {1.0}
    assert summary["against_reference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def translated(*chrf: float) -> dict[str, object]:
    """Returns what a policy of benchmarks.translation scores, by language."""
    languages = {
        str(index): {"chrf_mean": each, "chrf_greedy": each} for index, each in enumerate(chrf)
    }
    mean = float(np.mean(chrf))
    return {
        "chrf_mean": mean,
        "chrf_greedy": mean,
        "reward_mean": mean,
        "languages": languages,
        "correlation": {"prompts": 0.5},
        "cost": {"flops": 10},
    }


def test_arms_of_translation_are_compared_with_the_base_and_each_other_within_seeds():
    """Bases differ by 0.4 between seeds, gains by 0: an interval of width 0."""
    runs = {
        str(seed): {
            "base": translated(low, low + 0.2),
            "repaired": translated(low + 0.3, low + 0.4),
            "published": translated(low + 0.1, low + 0.2),
        }
        for seed, low in enumerate((0.1, 0.5))
    }
    found = translation.summarize(runs)
    exactly = {side: pytest.approx(0.25) for side in ("value", "low", "high")}
    assert found["gains"]["repaired"]["chrf_mean"] == exactly
    assert found["gains"]["repaired"]["languages"]["0"]["chrf_greedy"]["low"] == pytest.approx(0.3)
    assert found["gains"]["repaired"]["base_and_gain"] == pytest.approx([-1.0, -1.0])
    difference = found["differences"]["repaired - published"]["chrf_mean"]
    assert difference == {side: pytest.approx(0.2) for side in ("value", "low", "high")}


def test_guards_are_compared_with_the_references_and_each_other_within_seeds():
    """Seeds differ by 0.4 in every score, differences within them by 0: intervals of width 0."""

    def scored(level: float) -> dict[str, object]:
        scores = dict.fromkeys(translation_guards.WATCHED, level)
        return {**scores, "length_by_language": {"fi": level}}

    runs = {
        str(seed): {
            "references": scored(low + 0.3),
            "base": scored(low + 0.2),
            "guarded": scored(low + 0.4),
            "unguarded": scored(low + 0.1),
        }
        for seed, low in enumerate((0.1, 0.5))
    }
    found = translation_guards.summarize(runs)["unguarded"]
    for measured, expected in (
        (found["chrf"]["change"], -0.1),
        (found["chrf_below_guarded"], 0.3),
        (found["length_over_references"]["fi"], -0.2),
    ):
        assert measured == {side: pytest.approx(expected) for side in ("value", "low", "high")}


def test_translation_gives_each_judge_of_the_reward_to_evaluation_once():
    for judge in ("chrf", translation.FREE):
        params = translation.parameters(7, judge, ["repaired"])
        of_reward = [each["judge"] for each in params["reward"]["judges"]]
        of_evaluation = [each["judge"] for each in params["evaluation"]["judges"]]
        watched = ["chrf", "exact", "language", "copying", translation.FREE]
        assert sorted([*of_reward, *of_evaluation]) == sorted(watched)
        assert params["seed"] == 7


@pytest.mark.parametrize("arm", translation_dates.read_spec()["arms"])
def test_arms_on_dates_are_scored_by_every_judge(arm: str, tmp_path: Path):
    params = translation_dates.arm_parameters(7, arm)
    path = tmp_path / "params.yaml"
    path.write_text(dump_yaml(params))
    found = read_params(path)
    spec = translation_dates.read_spec()
    used = {each.judge for each in found.reward.judges if each.weight}
    assert used == set(spec["arms"][arm]["weights"])
    assert sorted(each.judge for each in found.judges("evaluation").values()) == sorted(
        [translation.FREE, *translation_dates.WATCHED, *translation_dates.OF_REFERENCES]
    )


def test_seconds_of_train_are_divided_by_what_it_did(tmp_path: Path):
    """Of 40 CPU seconds of train@a-1, half are sampling and a tenth is judging."""
    spent = {"rollout@a-1": 5.0, "score@a-1": 2.0, "train@a-1": 40.0}
    parts = {"load": 1.0, "sampling": 3.0, "simulation": 2.0, "judging": 1.0, "update": 3.0}
    write_json(tmp_path / PART_SECONDS, {"train@a-1": parts, "train@a-2": {"sampling": 9.0}})
    found = round_seconds(tmp_path, spent, "a-1")
    assert (found.sampling, found.judging, found.training) == pytest.approx((25.0, 6.0, 16.0))
    assert found.total == pytest.approx(sum(spent.values()))
    write_json(tmp_path / PART_SECONDS, {"train@a-1": {"load": 1.0, "update": 9.0}})
    found = round_seconds(tmp_path, spent, "a-1")
    assert (found.sampling, found.judging, found.training) == (5.0, 2.0, 40.0)


def test_phases_of_iterations_are_weighted_by_their_chunks():
    columns = ["phase", "chunks", "trained_chunks", "contrast", "keep"]
    first = pd.DataFrame([("a", 10, 5, 0.5, 0.9), ("b", 4, 2, np.nan, 0.8)], columns=columns)
    second = pd.DataFrame([("a", 30, 1, 0.1, 0.3), ("b", 6, 6, 0.2, np.nan)], columns=columns)
    assert combine_phases([first]) is first
    expected = pd.DataFrame([("a", 40, 6, 0.2, 0.3), ("b", 10, 8, 0.2, np.nan)], columns=columns)
    pd.testing.assert_frame_equal(combine_phases([first, second]), expected)


PROBE = """
import os, pathlib, shutil
seen = shutil.which("python"), os.environ.get("MLFLOW_TRACKING_URI"), os.environ["PREFECT_API_URL"]
pathlib.Path("seen").write_text(str(seen))
"""


def test_what_is_timed_finds_this_python_and_no_server_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.setenv(name, "http://elsewhere.invalid")
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "probe.py").write_text(PROBE)
    time_module(tmp_path, "probe", PREFECT_API_URL="own")
    python = str(Path(sys.executable).parent / "python")
    assert (tmp_path / "seen").read_text() == str((python, None, "own"))


def test_results_without_greedy_gains_still_have_a_table():
    score = {"value": 0.25, "low": 0.125, "high": 0.5}
    base = {"mean_at_k": score, "greedy": score, "pass_at_k": score, "score.boxes": score}
    arm = {**base, "gain_over_base": score, "cost": {"flops": 7e9}}
    shown = "0.250 [0.125, 0.500]"

    def rows(arm: dict[str, object], tabulate: Callable[..., str]) -> list[str]:
        runs = {"0": {"metrics": {"k": 4, "base": base, "arms": {"grpo": arm}}}}
        return tabulate({"runs": runs}).splitlines()

    assert rows(arm, table) == [
        "| seed | policy | mean@4 | gain over base | greedy | pass@4 | GFLOPs |",
        "|---|---|---|---|---|---|---|",
        f"| 0 | base | {shown} |  | {shown} | {shown} |  |",
        f"| 0 | grpo | {shown} | {shown} | {shown} | {shown} | 7 |",
    ]
    assert len(rows(arm, judges_table)) == 2  # titles only
    arm["other_gains_over_base"] = {"greedy": score, "score.boxes": score}
    titles, _, _, last = rows(arm, table)
    assert "| greedy | greedy gain over base | pass@4 |" in titles
    assert last == f"| 0 | grpo | {shown} | {shown} | {shown} | {shown} | {shown} | 7 |"
    (only,) = rows(arm, judges_table)[2:]
    assert only == f"| 0 | grpo | score.boxes | {shown} | {shown} | {shown} |"


def test_families_have_the_scores_of_the_base_and_of_the_last_round_of_every_arm(tmp_path: Path):
    params = read_yaml(ROOT / "recipes" / "grounding.yaml")
    (tmp_path / "params.yaml").write_text(dump_yaml(params))
    for index, name in enumerate(["base", *params["rounds"]]):
        rate = {"mean_at_k": index / len(params["rounds"])}
        summary = {"by_family": {"one": rate, "count": {"mean_at_k": 1.0}}}
        write_json(tmp_path / "artifacts" / "evaluations" / f"{name}.json", summary)
    found = family_scores(tmp_path)
    assert {name: each["one"]["mean_at_k"] for name, each in found.items()} == {
        "base": 0.0,
        "grpo": 1.0,
    }
    lower = {**found, "grpo": {**found["grpo"], "one": {"mean_at_k": 0.5}}}
    runs = {"0": {"families": found}, "1": {"families": lower}}
    assert families_table({"runs": runs}, {"mean@4": "mean_at_k"}).splitlines()[2:] == [
        "| count | 1.000 | +0.000 [+0.000, +0.000] |",
        "| one | 0.000 | +0.750 [-2.427, +3.927] |",  # half the difference times t of one degree
    ]


def test_an_unknown_word_draws_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["scaling_training", "drow"])
    monkeypatch.setattr(scaling_training, "save_figure", lambda figure, path: None)
    with pytest.raises(SystemExit, match=r"^drow: must be draw"):
        scaling_training.main()


def test_the_judge_that_trl_is_given_is_that_of_the_pipeline():
    task_params = read_yaml(ROOT / "params.yaml")["task"]
    prompts = make_prompts(
        families=task_params["families"],
        notation=task_params["notation"],
        instruction="",
        train_prompts=60,
        eval_prompts=6,
        warmup=None,
        seed=0,
    ).train
    outcomes = set()
    for row, other in zip(prompts.to_dict("records"), prompts["answer"][::-1]):
        answer = row["answer"]
        for text in (f"1+1#{answer}", f"# {answer} #{other}", "#", answer, "#11\ufffd 11"):
            theirs = outcome_of(
                text, row["family"], row["entry"], answer_pattern="#([^#]*)", threshold=0.99
            )
            task = Task(
                family=row["family"],
                prompt=row["prompt"],
                answer=row["answer"],
                entry=json.loads(row["entry"]),
            )
            ours = judge_text(
                score_answer, text, task, answer_pattern="#([^#]*)", timeout_seconds=5.0
            )
            assert theirs == float(ours.status == "scored" and ours.score >= 0.99)
            outcomes.add(theirs)
    assert outcomes == {0.0, 1.0}


def test_updates_end_with_their_iteration_as_long_before_the_run_as_before_the_stage():
    spans = [("update", 101.0, 102.0), ("sampling", 102.0, 104.0), ("update", 104.0, 106.0)]
    spans.append(("save", 106.0, 107.0))
    assert update_ends(spans, 4, 10.0) == [5.0, 5.0, 9.0, 9.0]


def a_run(cpu: float, reward: float) -> dict[str, object]:
    return {"cpu_seconds": cpu, "wall_seconds": 2 * cpu, "peak_bytes": 1, "reward": reward}


@pytest.mark.parametrize("reaches", [True, False])
def test_a_target_needs_a_ratio_and_the_reward(reaches: bool):
    seeds = {
        str(seed): {
            "trl": a_run(10, 0.5),
            "same": a_run(5, 0.51 - 0.01 * seed),  # on average as much as TRL
            "composed": a_run(3, 0.6),  # 0.3 of TRL's seconds
            "near_rate": a_run(2, 0.6 if reaches or seed else 0.4),
        }
        for seed in range(3)
    }
    found = peer_trl_run.conclude(seeds)
    assert found["met"] == {"same": True, "composed": False, "near_rate": reaches}
    expected = dict.fromkeys(("value", "low", "high"), 0.2)
    assert found["ratios"]["near_rate"]["cpu_seconds"] == pytest.approx(expected)


def test_runs_of_two_revisions_do_not_go_into_one_file(tmp_path: Path):
    path = tmp_path / "0.2M.json"
    peer_trl_run.require_revision(path, "a" * 40)
    write_json(path, {"revision": "a" * 40, "runs": {"3": {"trl": a_run(10, 0.5)}}})
    peer_trl_run.require_revision(path, "a" * 40)
    with pytest.raises(SystemExit, match="aaaaaaa, this is bbbbbbb; move the file away"):
        peer_trl_run.require_revision(path, "b" * 40)


def test_the_arm_default_is_that_of_the_default_recipe():
    recipe = read_yaml(ROOT / "params.yaml")["arms"]["composed"]
    default, composed = (
        params_of(SIZES["0.2M"], 0, arm)["arms"]["composed"] for arm in ("default", "composed")
    )
    assert default == recipe
    assert composed["objective"] == recipe["objective"]
    assert composed["training"] == {**recipe["training"], "iterations_per_round": 12}


@pytest.mark.parametrize("size", SIZES)
def test_both_sides_train_on_the_same_number_of_rollouts(size: str):
    order = order_of(SIZES[size], 0)
    arm = params_of(SIZES[size], 0, "same")["arms"]["same"]
    (phases, sizes) = arm["curriculum"]
    assert phases["split_at_random"]["phases"] == 1
    assert phases["split_at_random"]["prompts_per_phase"] == (
        order["updates"] * order["prompts_per_update"]
    )
    assert sizes["fix_group_size"]["rollouts"] == order["group_size"]
    assert arm["training"]["iterations_per_round"] == order["updates"]


def test_each_rollout_counts_for_its_family_in_its_iteration(tmp_path: Path):
    artifacts = tmp_path / "artifacts"
    write_prompts(artifacts)
    path = artifacts / "prompts/train.parquet"
    prompts = read_table(path, PROMPTS)  # never, half, always
    write_table(prompts.assign(family=["hard", "easy", "easy"]), path, PROMPTS)
    write_round(artifacts, "a-1", sampling=1, update=1)
    write_later_iteration(artifacts, "a-1", 1)
    found = by_family(tmp_path, ["a-1"])
    assert (found["hard"]["rollouts"][0], found["easy"]["rollouts"][0]) == (2, 2)
    assert (found["hard"]["solved"][0], found["easy"]["solved"][0]) == (0, 1)
    later = read_table(iterations_of(artifacts, "a-1")[1].rewards, REWARDS)
    assert sum(each["rollouts"][1] for each in found.values()) == len(later)
    assert sum(each["solved"][1] for each in found.values()) == later["outcome"].sum()


BURN = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.run([sys.executable, sys.argv[0], "child"], check=True)
held = bytearray(40_000_000)
while time.process_time() < 0.4:
    pass
"""


def test_seconds_and_memory_of_children_count(tmp_path: Path):
    (tmp_path / "burn.py").write_text(BURN)
    timed = run_timed([sys.executable, "burn.py"], folder=tmp_path)
    assert timed.cpu_seconds >= 0.8
    assert timed.wall_seconds >= 0.8
    assert timed.peak_bytes >= 40_000_000


def test_a_process_that_is_left_behind_is_refused(tmp_path: Path):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '3']).pid); time.sleep(0.5)"
    with pytest.raises(SystemExit, match="left processes behind"):
        run_timed([sys.executable, "-W", "ignore", "-c", code], folder=tmp_path)
