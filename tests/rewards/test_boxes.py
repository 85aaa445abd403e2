"""The judge of grounding: order is free, a perfect answer earns 1, missing and extra cost 1/n."""

from typing import Any

import numpy as np
import pytest

from grpo.rewards.base import Task
from grpo.rewards.box_distance import judge_distance
from grpo.rewards.boxes import (
    consolidated_error,
    intersection_over_union,
    judge_objects,
    parse_objects,
)
from grpo.sampling.judging import judge_text

BOXES = [[2, 2, 12, 12], [20, 4, 30, 10], [5, 30, 25, 40], [40, 40, 50, 60]]


def write(objects: Any) -> str:
    return " ; ".join(" ".join(f"{number:g}" for number in each) for each in objects)


def task_of(boxes: Any = BOXES, form: str = "boxes", answer: str | None = None) -> Task:
    return Task(
        family="f",
        prompt="",
        answer=write(boxes) if answer is None else answer,
        entry={"form": form, "boxes": boxes, "pixels": 64},
    )


def random_boxes(generator: np.random.Generator, count: int) -> Any:
    corner, size = generator.integers(0, 40, (count, 2)), generator.integers(1, 24, (count, 2))
    return np.concatenate([corner, corner + size], axis=1).astype(float)


def test_a_perfect_answer_earns_one_in_any_order():
    generator = np.random.default_rng(0)
    for _ in range(20):
        order = generator.permutation(len(BOXES))
        assert judge_objects(write(np.array(BOXES)[order]), task_of()) == 1.0


def test_the_order_of_predictions_does_not_matter_and_scores_are_in_bounds():
    generator = np.random.default_rng(0)
    for _ in range(200):
        true, given = (random_boxes(generator, count) for count in generator.integers(1, 6, 2))
        task = task_of(true.tolist())
        score = judge_objects(write(given), task)
        assert 0 <= score <= 1
        shuffled = given[generator.permutation(len(given))]
        assert judge_objects(write(shuffled), task) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_each_missing_object_costs_one_nth(kept: int):
    assert judge_objects(write(BOXES[:kept]), task_of()) == pytest.approx(kept / 4)


@pytest.mark.parametrize("extra", [1, 2, 4])
def test_each_extra_object_costs_one_nth_of_the_answer(extra: int):
    """Extra boxes that copy a true one: only one of the copies is matched."""
    answer = write([*BOXES, *[BOXES[0]] * extra])
    assert judge_objects(answer, task_of()) == pytest.approx(1 - extra / (4 + extra))


def test_the_intersection_is_that_of_counted_pixels():
    generator = np.random.default_rng(1)
    true, given = random_boxes(generator, 20), random_boxes(generator, 20)
    found = intersection_over_union(true, given)
    covered = np.zeros((2, 20, 70, 70), dtype=bool)
    for part, boxes in enumerate((true, given)):
        for row, (left, top, right, bottom) in enumerate(boxes.astype(int)):
            covered[part, row, top:bottom, left:right] = True
    for row in range(20):
        for column in range(20):
            one, other = covered[0, row], covered[1, column]
            assert found[row, column] == pytest.approx((one & other).sum() / (one | other).sum())


def test_matching_is_the_best_of_all_assignments():
    """Greedy by the largest overlap would take 0.6 and leave 0 for the other; 0.5 + 0.5 is more."""
    true = [[0, 0, 10, 10], [10, 0, 20, 10]]
    given = [[5, 0, 15, 10], [0, 0, 10, 5]]
    both = judge_objects(write(given), task_of(true))
    assert both == pytest.approx((0.5 + 1 / 3) / 2)


def test_points_count_within_their_box_once_each():
    task = task_of(BOXES[:2], "points", "7 7 ; 25 7")
    assert judge_objects("25 7 ; 7 7", task) == 1.0
    assert judge_objects("7 7 ; 8 8", task) == 0.5
    assert judge_objects("7 7", task) == 0.5
    assert judge_objects("7 7 ; 25 7 ; 60 60", task) == pytest.approx(2 / 3)
    assert judge_objects("60 60", task) == 0.0


def test_a_count_is_right_or_wrong():
    task = task_of([], "count", "3")
    assert judge_objects("3", task) == 1.0
    assert judge_objects("4", task) == 0.0
    assert judge_objects("3 ; 3", task) == 0.0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("2 2 12", "an object must have 4 numbers, got '2 2 12'"),
        ("2 2 12 12 ;", "an object must have 4 numbers"),
        ("2 2 12 x", "coordinates must be numbers"),
        ("2 2 12 -3", "coordinates must be numbers"),
        ("2 2 12 nan", "coordinates must be numbers"),
        ("2 2 12 1e400", "coordinates must be numbers"),
        ("2 2 12 ١٢", "coordinates must be numbers"),
        ("12 2 2 12", "left < right"),
        ("2 2 2 12", "left < right"),
        (" ; ".join(["2 2 12 12"] * 65), "at most 64 objects"),
    ],
)
def test_a_wrong_form_earns_nothing_and_counts_as_unparsable(answer: str, said: str):
    with pytest.raises(ValueError, match=said):
        judge_objects(answer, task_of())
    outcome = judge_text(
        judge_objects, answer, task_of(), answer_pattern="(?s)^(.*)$", timeout_seconds=5.0
    )
    assert (outcome.score, outcome.status) == (0.0, "unparsable")


def test_an_empty_answer_has_no_objects():
    assert parse_objects("  ", width=4).shape == (0, 4)
    assert judge_objects("", task_of()) == 0.0
    assert judge_objects("", task_of([])) == 1.0


def test_the_consolidated_error_of_a_shifted_box_by_hand():
    """10 pixels shifted by 5 of 50: IoU 1/3, mean distance of corners and of centers 2.5 / 50."""
    true, given = np.array([[0.0, 0, 10, 10]]), np.array([[5.0, 0, 15, 10]])
    expected = ((1 - 1 / 3) + 0.05 + 0.05) / 3
    assert consolidated_error(true, given, pixels=50) == pytest.approx(expected)


def test_the_consolidated_error_has_the_laws_of_the_judge():
    generator = np.random.default_rng(2)
    none = np.zeros((0, 4))
    for _ in range(100):
        true, given = (random_boxes(generator, count) for count in generator.integers(1, 6, 2))
        error = consolidated_error(true, given, pixels=64)
        assert 0 <= error <= 1
        mixed = given[generator.permutation(len(given))]
        assert consolidated_error(true, mixed, pixels=64) == pytest.approx(error)
        assert consolidated_error(true, true[::-1], pixels=64) == 0.0
        assert consolidated_error(true, none, pixels=64) == 1.0
    boxes = np.array(BOXES, dtype=float)
    for kept in range(1, 4):
        assert consolidated_error(boxes, boxes[:kept], pixels=64) == pytest.approx(1 - kept / 4)
        assert consolidated_error(boxes[:kept], boxes, pixels=64) == pytest.approx(1 - kept / 4)
    assert consolidated_error(none, none, pixels=64) == 0.0
    with pytest.raises(ValueError, match="pixels > 0"):
        consolidated_error(boxes, boxes, pixels=0)


def test_the_judge_of_distances_tells_apart_answers_that_miss():
    """By hand for a box that misses: IoU 0, corners and centers 10 of 64 pixels away on average."""
    one = task_of([[0, 0, 10, 10]])
    assert judge_objects("20 0 30 10", one) == 0
    assert judge_distance("20 0 30 10", one) == pytest.approx(1 - (1 + 2 * 10 / 64) / 3)
    assert judge_distance("12 0 22 10", one) > judge_distance("20 0 30 10", one)
    # A point 3 and 4 pixels from the center: 3.5 on average.
    assert judge_distance("8 9", task_of([[0, 0, 10, 10]], "points")) == 1 - 3.5 / 64


@pytest.mark.parametrize("form", ["boxes", "points"])
def test_the_judge_of_distances_has_the_laws_of_an_error(form: str):
    true = BOXES if form == "boxes" else [[(a + c) / 2, (b + d) / 2] for a, b, c, d in BOXES]
    task = task_of(form=form)
    assert judge_distance(write(true[::-1]), task) == 1.0
    assert judge_distance(write(true[:3]), task) == pytest.approx(3 / 4)
    assert judge_distance("", task) == 0.0
    assert judge_distance("", task_of([], form)) == 1.0
    with pytest.raises(ValueError, match="numbers"):
        judge_distance("1 2 3", task)


def test_the_judge_of_distances_reads_counts_as_the_judge_of_boxes():
    task = task_of(form="count", answer="4")
    assert [judge_distance(each, task) for each in ("4", "5")] == [1.0, 0.0]
