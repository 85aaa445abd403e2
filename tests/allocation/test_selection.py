"""Where rollouts are spent: what is passed over, in which order, and what is learned of it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.allocation.selection import (
    KEEP_BASE,
    VISITS,
    History,
    Selection,
    compose,
    learn_round,
    require_candidates,
    resample_uniform_groups,
    reuse_profile_rollouts,
    skip_uniform_prompts,
    visit,
    visit_prompts,
)
from grpo.errors import ParameterError
from grpo.modalities.shared.directories import STATE, PolicyState, read_state, write_state

FLOOR = 0.01
SKIP = skip_uniform_prompts(prompts=4)


def pool(size: int) -> pd.DataFrame:
    return pd.DataFrame({"prompt_id": [f"p{each}" for each in range(size)], "rollouts": 4})


def outcomes(**groups: list[float]) -> pd.DataFrame:
    """Returns prompt_id and outcome per rollout: outcomes(a=[1, 0], b=[0, 0])."""
    rows = [(prompt, float(each)) for prompt, group in groups.items() for each in group]
    return pd.DataFrame(rows, columns=["prompt_id", "outcome"]).assign(steps=1)


def after(history: History, *rounds: pd.DataFrame, selection: Selection = SKIP) -> History:
    for each in rounds:
        history = learn_round(selection, history, each, [])
    return history


def chance(history: History, prompt: str, selection: Selection = SKIP) -> float:
    return float(selection.keep_chance([prompt], history)[0])


def test_a_prompt_is_kept_with_p_to_the_length_of_its_streak():
    easy = after({}, outcomes(a=[1, 1]))
    assert chance(easy, "a") == 0.5
    assert chance(easy, "never seen") == 1.0
    twice = after({KEEP_BASE: {"easy": 0.5, "hard": 0.3}, "hard_streak": {"b": 2}})
    assert chance(twice, "b") == pytest.approx(0.09)


def test_the_chance_falls_with_the_streak_and_never_below_the_floor():
    chances = [chance({"hard_streak": {"a": length}}, "a") for length in range(2000)]
    assert (np.diff(chances) <= 0).all()
    assert min(chances) == FLOOR


@pytest.mark.parametrize(
    ("groups", "streaks"),
    [
        ([[1, 1], [1, 1]], (2, 0)),
        ([[1, 1], [1, 0]], (0, 0)),
        ([[1, 1], [0, 0]], (0, 1)),
        ([[0, 0], [0, 0], [0, 0]], (0, 3)),
    ],
)
def test_a_streak_counts_groups_of_one_kind_in_a_row(groups: list, streaks: tuple[int, int]):
    history = after({}, *(outcomes(a=each) for each in groups))
    found = tuple(history[kind].get("a", 0) for kind in ("easy_streak", "hard_streak"))
    assert found == streaks


def test_a_prompt_that_is_passed_over_keeps_its_streak_and_counts_as_visited():
    history = after({}, outcomes(a=[1, 1], b=[1, 0]))
    later = learn_round(SKIP, history, outcomes(b=[1, 0]), ["a"])
    assert later["easy_streak"] == {"a": 1}
    assert later[VISITS] == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("group", "easy", "hard"),
    [([1, 1], -1, 1), ([0, 0], 1, -1), ([1, 0], 1, 1)],
    ids=["too many easy", "too many hard", "all mixed"],
)
def test_p_falls_where_its_kind_exceeds_the_target_and_rises_elsewhere(
    group: list, easy: int, hard: int
):
    seen = after({}, outcomes(a=[1, 0]))
    moved = after(seen, outcomes(a=group))[KEEP_BASE]
    assert moved == {"easy": pytest.approx(0.5 + 0.01 * easy), "hard": 0.5 + 0.01 * hard}


def test_p_does_not_move_before_prompts_come_again():
    assert after({}, outcomes(a=[1, 1]), outcomes(b=[1, 1]))[KEEP_BASE] == {
        "easy": 0.5,
        "hard": 0.5,
    }


def test_p_stays_within_the_papers_bounds():
    fast = skip_uniform_prompts(prompts=1, step=0.4)
    history = after({}, *[outcomes(a=[1, 1])] * 9, selection=fast)
    assert history[KEEP_BASE] == {"easy": 0.05, "hard": 0.95}


def test_candidates_are_passed_over_as_often_as_the_chance_says():
    """100 prompts of each streak, 40 rounds."""
    streaks = {f"p{each}": each % 5 for each in range(500)}
    history: History = {"hard_streak": dict(streaks)}
    whole = skip_uniform_prompts(prompts=500)
    kept: Counter[int] = Counter()
    for seed in range(40):
        chosen, _ = visit(whole, pool(500), history, seed)
        kept.update(streaks[each] for each in chosen["prompt_id"])
    for streak in range(5):
        expected = max(0.5**streak, FLOOR)
        error = np.sqrt(expected * (1 - expected) / 4000)
        assert abs(kept[streak] / 4000 - expected) <= 4 * error


def test_a_round_gets_a_group_even_if_every_candidate_is_passed_over():
    history = {"hard_streak": {f"p{each}": 50 for each in range(4)}}
    chosen = [len(visit(SKIP, pool(4), history, seed)[0]) for seed in range(50)]
    assert min(chosen) == 1


def test_no_prompt_is_visited_twice_before_all_are_visited_once():
    """12 candidates, 4 an iteration: three iterations are a pass, whatever the outcomes."""
    selection, history, visited = visit_prompts(prompts=4), {}, []
    for seed in range(9):
        chosen, skipped = visit(selection, pool(12), history, seed)
        assert skipped == []
        ids = chosen["prompt_id"].tolist()
        uniform = outcomes(**{each: [seed % 2] * 2 for each in ids})
        history = learn_round(selection, history, uniform, skipped)
        visited += ids
    passes = [visited[start : start + 12] for start in (0, 12, 24)]
    assert [sorted(each) for each in passes] == [sorted(pool(12)["prompt_id"])] * 3
    assert passes[0] != passes[1] != passes[2]
    assert history.keys() == {VISITS}


@pytest.mark.parametrize(
    "selection", [SKIP, resample_uniform_groups(prompts=4, prompts_per_batch=2, max_batches=2)]
)
def test_rounds_go_through_a_pool_in_epochs(selection: Selection):
    """10 candidates, 4 a round: after any round no prompt is two visits ahead of another."""
    history: History = {}
    for seed in range(12):
        chosen, skipped = visit(selection, pool(10), history, seed)
        assert len(chosen) == 4
        assert skipped == []
        mixed = outcomes(**{each: [1, 0] for each in chosen["prompt_id"]})
        history = learn_round(selection, history, mixed, skipped)
        counts = [history[VISITS].get(each, 0) for each in pool(10)["prompt_id"]]
        assert max(counts) - min(counts) <= 1


def test_what_is_passed_over_frees_places_for_other_candidates():
    history = {"easy_streak": {f"p{each}": 60 for each in range(20)}}
    chosen, skipped = visit(SKIP, pool(40), history, seed=0)
    assert len(chosen) == 4
    assert len(skipped) > 0
    assert set(skipped).isdisjoint(chosen["prompt_id"])


def test_every_candidate_of_a_pool_that_ends_was_visited():
    history: History = {"easy_streak": {f"p{each}": 3 for each in range(6)}}
    for seed in range(20):
        chosen, skipped = visit(skip_uniform_prompts(prompts=6), pool(6), history, seed)
        assert len(chosen) + len(skipped) == 6


def test_without_a_step_every_candidate_is_sampled_in_its_order():
    chosen, skipped = visit(compose(), pool(5), {}, seed=0)
    pd.testing.assert_frame_equal(chosen, pool(5))
    assert skipped == []
    assert learn_round(compose(), {"x": {"y": 1.0}}, outcomes(a=[1, 1]), []) == {"x": {"y": 1.0}}


def test_steps_compose():
    both = compose(SKIP, reuse_profile_rollouts())
    assert [link.name for link in both.links] == ["skip_uniform_prompts", "reuse_profile_rollouts"]
    assert both.budget == SKIP.budget
    assert both.reuses_profile
    history = {"easy_streak": {"a": 2}}
    assert chance(history, "a", both) == chance(history, "a") == 0.25


def test_the_history_comes_back_from_a_policy_directory(tmp_path: Path):
    history = after({}, outcomes(a=[1, 1], b=[0, 0]), outcomes(a=[1, 1], c=[1, 0]))
    state = PolicyState(name="r-1", arm="a", start="base", selection_state=history)
    write_state(tmp_path, state)
    assert read_state(tmp_path, "r-1") == state


def test_a_policy_without_a_selection_is_stored_as_before(tmp_path: Path):
    write_state(tmp_path, PolicyState(name="base"))
    assert "selection_state" not in json.loads((tmp_path / STATE).read_text())
    assert read_state(tmp_path, "base").selection_state == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: visit_prompts(prompts=0), "visit_prompts.prompts must be at least 1, got 0"),
        (lambda: require_candidates(visit_prompts(prompts=4), 3), "visit_prompts needs 4 prompts"),
        (lambda: skip_uniform_prompts(prompts=0), "prompts must be at least 1"),
        (lambda: skip_uniform_prompts(prompts=1, floor=1.5), r"floor must be in \[0, 1\], got 1.5"),
        (lambda: skip_uniform_prompts(prompts=1, start=-0.1), r"start must be in \[0, 1\]"),
        (lambda: resample_uniform_groups(9, 2, max_batches=4), r"got 2 \* 4 < 9"),
        (lambda: resample_uniform_groups(1, 1, max_batches=0), "max_batches must be at least 1"),
        (lambda: require_candidates(SKIP, 3), "needs 4 prompts, the phase has 3"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(make, message: str):
    with pytest.raises(ParameterError, match=message):
        make()
