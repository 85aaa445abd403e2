"""The judge of grounding: boxes, points or a number, matched to those of the answer.

An answer is "left top right bottom ; ..." for boxes, "x y ; ..." for points, in pixels, and one
number for a count.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task

SEPARATOR = ";"  # between objects
NUMBER = re.compile(r"[0-9]{1,5}(\.[0-9]{1,3})?")
FORMS = {"count": 1, "points": 2, "boxes": 4}  # numbers per object
MOST_OBJECTS = 64  # of an answer; matching takes cubic time
TrueBoxes = Float[np.ndarray, "true 4"]
GivenBoxes = Float[np.ndarray, "given 4"]
Pairs = Float[np.ndarray, "true given"]  # a number per pair of a true and a given object


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge."""
    return judge_objects


def judge_objects(answer: str, task: Task) -> float:
    """Returns the mean IoU of boxes, the share of points in their boxes, or 1 for a right count.

    The form is `entry["form"]`, the true boxes are `entry["boxes"]`. Objects that are missing or
    too many score 0, see `mean_score`.

    Raises:
      ValueError: If the answer does not have the form.
    """
    boxes, given = read_answer(answer, task)
    if given.shape[1] == FORMS["count"]:
        return float(given.shape == (1, 1) and given[0, 0] == float(task.answer))
    if given.shape[1] == FORMS["points"]:
        return mean_score(contain(boxes, given))
    return mean_score(intersection_over_union(boxes, given))


def read_answer(answer: str, task: Task) -> tuple[TrueBoxes, Float[np.ndarray, "given number"]]:
    """Returns the true boxes and the objects of an answer in the form of its task.

    Raises:
      ValueError: If the answer does not have the form.
    """
    given = parse_objects(answer, width=FORMS[str(task.entry["form"])])
    if given.shape[1] == FORMS["boxes"] and (given[:, 2:] <= given[:, :2]).any():
        raise ValueError("a box must have left < right and top < bottom")
    return np.array(task.entry["boxes"], dtype=float).reshape(-1, 4), given


def parse_objects(answer: str, *, width: int) -> Float[np.ndarray, "object number"]:
    """Returns the objects of an answer, `width` numbers each; without text there is none.

    Raises:
      ValueError: If something is no number, or an object has more or fewer.
    """
    parts = [each.split() for each in answer.split(SEPARATOR)] if answer.strip() else []
    if len(parts) > MOST_OBJECTS:
        raise ValueError(f"an answer must have at most {MOST_OBJECTS} objects, got {len(parts)}")
    for each in parts:
        if len(each) != width:
            raise ValueError(f"an object must have {width} numbers, got {' '.join(each)!r}")
        for text in each:
            if not NUMBER.fullmatch(text):
                raise ValueError(f"coordinates must be numbers such as 12 or 12.5, got {text!r}")
    return np.array([[float(text) for text in each] for each in parts]).reshape(-1, width)


def mean_score(score: Pairs) -> float:
    """Returns the best one-to-one sum of scores over max(number true, number given).

    An object that is missing or too many thus costs 1/n. Without any object, an empty answer is
    right: 1. [Kuhn, 1955]
    """
    count = max(score.shape)
    return float(score[match(-score)].sum() / count) if count else 1.0


def match(cost: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and columns of the one-to-one assignment with the least total cost."""
    # Imported here: `grpo check` reads this file and does not match.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost)
    return rows, columns


def intersection_over_union(true: TrueBoxes, given: GivenBoxes) -> Pairs:
    """Returns the area of the intersection over that of the union of each pair of boxes."""
    low = np.maximum(true[:, None, :2], given[None, :, :2])
    high = np.minimum(true[:, None, 2:], given[None, :, 2:])
    shared = (high - low).clip(min=0).prod(axis=2)
    area = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (true, given)]
    ratio: np.ndarray = shared / (area[0][:, None] + area[1][None] - shared)
    return ratio


def contain(boxes: TrueBoxes, points: Float[np.ndarray, "given 2"]) -> Pairs:
    """Returns 1 for each pair of a box and a point within it, else 0."""
    inside = (boxes[:, None, :2] <= points[None]) & (points[None] <= boxes[:, None, 2:])
    held: np.ndarray = inside.all(axis=2).astype(float)
    return held


def consolidated_error(true: TrueBoxes, given: GivenBoxes, *, pixels: int) -> float:
    """Returns the mean of 1/3 [(1 - IoU) + L1(box) + L1(center)] over matched objects.

    L1 is the mean absolute difference of coordinates as a fraction of the image, at most 1. An
    object that is missing or too many has error 1. Without any object: 0. [Group Revision, 2026]

    Unlike the paper: the point of an object is the center of its box.

    Args:
      pixels: Side of the image.

    Raises:
      ValueError: If `pixels` is not above 0.
    """
    if pixels <= 0:
        raise ValueError(f"consolidated_error needs pixels > 0, got {pixels}")
    overlap = intersection_over_union(true, given)
    corners = distance(true, given, pixels)
    middles = distance(centers(true), centers(given), pixels)
    return mean_error(((1 - overlap) + corners + middles) / 3)


def mean_error(error: Pairs) -> float:
    """Returns the least one-to-one mean of errors; a missing or needless object has error 1.

    Without any object: 0.
    """
    count = max(error.shape)
    matched = match(error)
    return float((error[matched].sum() + count - len(matched[0])) / count) if count else 0.0


def centers(boxes: Float[np.ndarray, "object 4"]) -> Float[np.ndarray, "object 2"]:
    """Returns the center of each box."""
    middle: np.ndarray = (boxes[:, :2] + boxes[:, 2:]) / 2
    return middle


def distance(
    true: Float[np.ndarray, "true number"],
    given: Float[np.ndarray, "given number"],
    pixels: int,
) -> Pairs:
    """Returns the mean absolute difference of each pair, as a fraction of the image."""
    apart: np.ndarray = np.abs(true[:, None] - given[None]).mean(axis=2) / pixels
    return apart.clip(max=1.0)


def find_objects(text: str) -> Sequence[tuple[float, ...]]:
    """Returns the boxes and points of an answer, of any form; none if it has no form."""
    for width in (4, 2):
        try:
            return [tuple(each) for each in parse_objects(text, width=width).tolist()]
        except ValueError:
            continue
    return []


JUDGE = Judge(reads="text", load=load, needs_task="grounding")
