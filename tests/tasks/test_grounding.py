"""The task of grounding: an expression is true of exactly the objects in its answer."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydantic import ValidationError

from grpo.errors import ParameterError
from grpo.modalities.modality import PairWarmup, TextWarmup
from grpo.modalities.shared.images import split_prompt
from grpo.rewards.base import Task as Judged
from grpo.rewards.boxes import judge_objects
from grpo.tasks.base import PromptTables, TaskInputs
from grpo.tasks.grounding import BACKGROUNDS, COLORS, GRID, GroundingTask, spoil_as_policies

WARMUP = PairWarmup(prompts=400, updates=1, rows_per_update=1, learning_rate=0.1)
PLAIN = {"style": "filled", "min_objects": 2, "max_objects": 5, "warmup": 1.0, "pairs": "known"}
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {**PLAIN, "question": name}
        for name in ("one", "point", "size", "relation", "all", "count")
    },
    "compound": {**PLAIN, "question": "compound", "min_objects": 4, "max_objects": 6},
    "outlined": {**PLAIN, "question": "one", "style": "outlined", "warmup": 0.0},
    "dark": {**PLAIN, "question": "all", "style": "dark", "warmup": 0.0},
    "new_pairs": {**PLAIN, "question": "one", "warmup": 0.0, "pairs": "held_out"},
}
HELD_OUT = ["red circle", "blue cross"]


def tables(warmup: Any = WARMUP, *, seed: int = 0, **changes: Any) -> PromptTables:
    settings = {
        "train_prompts": 270,
        "eval_prompts": 200,
        "pixels": 48,
        "instruction": "",
        "held_out_pairs": HELD_OUT,
        "revised_pairs": None,
        "families": FAMILIES,
    }
    task = GroundingTask(kind="grounding", **{**settings, **changes})
    return task.make_prompts(
        TaskInputs(seed=seed, data=Path(), warmup=warmup, takes_messages=False)
    )


@pytest.fixture(scope="module")
def made() -> PromptTables:
    return tables()


@pytest.fixture(scope="module")
def asked(made: PromptTables) -> list[dict[str, Any]]:
    rows = pd.concat([made.train, made.eval]).to_dict("records")
    return [
        {**row, "entry": json.loads(row["entry"]), "question": split_prompt(row["prompt"])[1]}
        for row in rows
    ]


def pixels_of(prompt: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(split_prompt(prompt)[0])))


def true_objects(question: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the objects of which a question is true, read word by word."""
    words = question.split()
    relations = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}
    found = next((word for word in words if word in relations), None)
    anchor = words[-1] if found else None
    named = words[: words.index(found)] if found else words
    kept = [
        each
        for each in objects
        if all(
            word in (each["color"], each["shape"], each["size"])
            for word in named
            if word not in ("box", "point", "count", "at", "the", "all")
        )
    ]
    if found is None:
        return kept
    axis, sign = relations[found]
    others = [each for each in objects if each["shape"] == anchor]
    assert len(others) == {"the": 1, "two": 2, "three": 3}[words[-2]]
    middles = [other["box"][axis] + other["box"][axis + 2] for other in others]
    return [
        each
        for each in kept
        if all(
            sign * (each["box"][axis] + each["box"][axis + 2] - middle) > 0 for middle in middles
        )
    ]


def test_an_expression_is_true_of_exactly_the_objects_in_its_answer(asked: list[dict[str, Any]]):
    for row in asked:
        true = sorted(
            each["box"] for each in true_objects(row["question"], row["entry"]["objects"])
        )
        assert sorted(row["entry"]["boxes"]) == true, row["question"]
        numbers = [[float(word) for word in part.split()] for part in row["answer"].split(" ; ")]
        if row["question"].startswith("count"):
            assert numbers == [[len(true)]]
        elif row["question"].startswith("point"):
            assert numbers == [[(box[0] + box[2]) / 2, (box[1] + box[3]) / 2] for box in true]
            assert len(true) == 1
        else:
            assert numbers == true


def test_questions_are_as_hard_as_their_family_says(asked: list[dict[str, Any]]):
    """Alike objects, or several of a shape: without the size or the relation, none is meant."""
    for row in asked:
        entry, words = row["entry"], row["question"].split()
        if row["family"] in (
            "one",
            "point",
            "size",
            "outlined",
            "new_pairs",
            "relation",
            "compound",
        ):
            assert len(entry["boxes"]) == 1
        if row["family"] == "size":
            alike = [
                each for each in entry["objects"] if [each["color"], each["shape"]] == words[3:]
            ]
            assert len(alike) > 1
        if row["family"] == "compound":
            alike = [
                each
                for each in entry["objects"]
                if [each["size"], each["color"], each["shape"]] == words[2:5]
            ]
            assert len(alike) > 1
            assert words[-2] in ("two", "three")
        if row["family"] == "relation":
            assert sum(each["shape"] == words[2] for each in entry["objects"]) > 1
        if row["family"] in ("all", "dark"):
            assert len(entry["boxes"]) > 1


def test_every_answer_earns_one(asked: list[dict[str, Any]]):
    for row in asked:
        task = Judged(family=row["family"], prompt="", answer=row["answer"], entry=row["entry"])
        assert judge_objects(row["answer"], task) == 1.0


def test_shapes_fill_their_boxes_and_nothing_else(asked: list[dict[str, Any]]):
    """The pixels of a color are in the boxes of that color and touch all their sides."""
    for row in asked:
        image = pixels_of(row["prompt"])
        assert image.shape == (48, 48, 3)
        is_drawn = np.zeros((48, 48), dtype=bool)
        for each in row["entry"]["objects"]:
            left, top, right, bottom = each["box"]
            within = (image[top:bottom, left:right] == COLORS[each["color"]]).all(axis=2)
            for side in (within[0], within[-1], within[:, 0], within[:, -1]):
                assert side.any(), (each, row["family"])
            is_drawn[top:bottom, left:right] = True
        style = FAMILIES[row["family"]]["style"]
        assert (image[~is_drawn] == BACKGROUNDS[style]).all()


def test_no_scene_is_in_two_parts(made: PromptTables):
    parts = [{split_prompt(each)[0] for each in table["prompt"]} for table in made]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert (len(made.train), len(made.eval)) == (270, 200)
    assert abs(len(made.warmup) - 400) <= len(FAMILIES)  # rounded per family
    assert set(made.train["family"].value_counts()) == {30}
    assert set(made.eval["family"].value_counts()) == {20}


def test_some_warm_up_pairs_ask_to_revise_an_answer(made: PromptTables):
    """Of the same questions and solutions; a wrong answer has the form of the right one."""
    template = " not {answer}"
    revised = tables(revised_pairs={"share": 0.5, "right": 0.4, "shift": 6, "template": template})
    pd.testing.assert_frame_equal(revised.train, made.train)
    pairs = list(zip(made.warmup["prompt"], revised.warmup.to_dict("records")))
    first = {
        row["prompt_id"]: row["prompt"].removeprefix(prompt + " not ")
        for prompt, row in pairs
        if row["prompt"] != prompt
    }
    assert len(first) == round(0.5 * len(pairs))
    right = 0
    for _, row in pairs:
        if row["prompt_id"] in first:
            given, solution = first[row["prompt_id"]], row["solution"]
            assert [len(each.split()) for each in given.split(";")] == (
                [len(each.split()) for each in solution.split(";")]
            )
            numbers = np.array([float(each) for each in given.replace(";", "").split()])
            assert ((numbers >= 0) & (numbers <= 48)).all()
            wanted = np.array([float(each) for each in solution.replace(";", "").split()])
            assert np.abs(numbers - wanted).max() <= 6
            right += given == solution
    # Four standard deviations of a share of 0.4.
    assert abs(right / len(first) - 0.4) < 4 * (0.24 / len(first)) ** 0.5
    assert revised.warmup["solution"].equals(made.warmup["solution"])


def test_varied_errors_are_wrong_answers_of_numbers_that_right_answers_have():
    template = " not {answer}"
    settings = {"share": 1.0, "right": 0.0, "shift": 12, "template": template, "errors": "varied"}
    plain, revised = tables().warmup, tables(revised_pairs=settings).warmup
    kinds = set()
    for prompt, row in zip(plain["prompt"], revised.to_dict("records")):
        given = row["prompt"].removeprefix(prompt + " not ")
        wrong, right = (
            [each.split() for each in text.split(" ; ")] for text in (given, row["solution"])
        )
        assert given != row["solution"]
        assert [*map(len, wrong)] == [*map(len, right)]
        (old,), (new,) = (
            [each for each in a if each not in b] or a[:1]
            for a, b in ((right, wrong), (wrong, right))
        )
        numbers = [float(each) for each in new]
        if len(new) == 1:
            assert abs(float(old[0]) - numbers[0]) == 1
            continue
        assert all(0 <= each <= 48 and (2 * each) % GRID == 0 for each in numbers)
        if len(new) == 4:
            assert all(each % GRID == 0 for each in numbers)
            sides = [int(box[2]) - int(box[0]) for box in (old, new)]
            kinds.add("size" if sides[0] != sides[1] else "place")
    assert kinds == {"size", "place"}


def test_a_varied_error_may_be_another_object_of_the_scene(asked: list[dict[str, Any]]):
    row = next(each for each in asked if each["family"] == "size")
    drawn = {
        spoil_as_policies(row["answer"], row["entry"], 12, random.Random(seed))
        for seed in range(60)
    }
    boxes = {" ".join(map(str, each["box"])) for each in row["entry"]["objects"]}
    assert row["answer"] not in drawn
    assert boxes - {row["answer"]} <= drawn


def test_held_out_pairs_are_in_evaluation_only(made: PromptTables):
    def pairs(table: pd.DataFrame) -> set[str]:
        return {
            f"{each['color']} {each['shape']}"
            for entry in table["entry"]
            for each in json.loads(entry)["objects"]
        }

    assert pairs(made.train).isdisjoint(HELD_OUT)
    assert "new_pairs" not in set(made.train["family"]) | set(made.warmup["family"])
    new = made.eval[made.eval["family"] == "new_pairs"]
    for _, row in new.iterrows():
        assert " ".join(split_prompt(row["prompt"])[1].split()[2:]) in HELD_OUT
    for table in (made.train, made.warmup):
        for prompt in table["prompt"]:
            assert not any(pair in prompt for pair in HELD_OUT)


def test_the_warmup_has_families_by_their_shares(made: PromptTables):
    counts = made.warmup["family"].value_counts()
    assert set(counts.index) == {"one", "point", "size", "relation", "compound", "all", "count"}
    assert counts.max() - counts.min() <= 1
    for prompt in made.warmup["prompt"]:
        assert (pixels_of(prompt) == BACKGROUNDS["filled"]).all(axis=2).any()


def test_the_instruction_follows_every_question(made: PromptTables):
    told = tables(instruction=" in pixels")
    for plain, other in zip((made.train, made.eval), (told.train, told.eval)):
        expected = [split_prompt(each)[1] + " in pixels" for each in plain["prompt"]]
        assert [split_prompt(each)[1] for each in other["prompt"]] == expected


def test_the_same_seed_asks_the_same_and_another_something_else():
    first, again, other = tables(), tables(), tables(seed=1)
    for one, two in zip(first, again):
        pd.testing.assert_frame_equal(one, two)
    assert set(first.train["prompt"]).isdisjoint(other.train["prompt"])


@pytest.mark.parametrize(
    ("changes", "warmup", "said"),
    [
        (
            {
                "families": {
                    "size": {**PLAIN, "question": "size", "min_objects": 1, "max_objects": 1}
                }
            },
            WARMUP,
            "size",
        ),
        (
            {"families": {"new": {**PLAIN, "question": "one", "pairs": "held_out"}}},
            WARMUP,
            "a family with pairs known",
        ),
        (
            {"families": {"one": {**PLAIN, "question": "one", "warmup": 0.0}}},
            WARMUP,
            "warmup above 0",
        ),
        (
            {"families": {name: {**PLAIN, "question": name} for name in ("one", "point", "count")}},
            WARMUP.model_copy(update={"prompts": 1}),
            r"policy\.base\.warmup\.prompts must be larger, got 1",
        ),
        (
            {},
            TextWarmup(
                **WARMUP.model_dump(), answer_mark="#", worked_fraction=0.0, wrong_fraction=0.0
            ),
            r"answer_mark is unknown with task\.kind grounding",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(changes: dict[str, Any], warmup: Any, said: str):
    with pytest.raises(ParameterError, match=said):
        tables(warmup, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"held_out_pairs": ["pink circle"]},
        {"revised_pairs": {"share": 0.3, "right": 0.3, "shift": 6, "template": "no place"}},
        {
            "revised_pairs": {
                "share": 0.3,
                "right": 0.3,
                "shift": 1,
                "template": "{answer}",
                "errors": "varied",
            }
        },
        {"families": {"one": {**PLAIN, "question": "one", "min_objects": 6}}},
    ],
)
def test_wrong_parameters_are_refused(changes: dict[str, Any]):
    with pytest.raises(ValidationError):
        tables(**changes)
