"""Rendered scenes of shapes with referring expressions; answers are boxes, points or a number.

Needs Pillow, an extra (pip install -e '.[vision_language]').
"""

import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
from pydantic import Field, field_validator, model_validator

from grpo.errors import MissingExtraError, ParameterError
from grpo.modalities.shared.images import join_prompt
from grpo.schema import ANSWER, PARAMS, Fraction, Name, Positive, Strict, WithOptionalKeys
from grpo.tasks.base import PromptTables, Task, TaskInputs, as_solutions, require_pairs, shares

COLORS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 195, 20),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIDES = {"small": (8, 10), "large": (16, 18)}  # pixels
GRID = 2  # coordinates are multiples of it
GAP = 2  # least distance between shapes, in pixels
MARGIN = 4  # least difference of centers for which a relation is asked, in pixels
# The axis, and the sign of the difference of centers.
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
WORD_BY_COUNT = {2: "two", 3: "three"}  # of the objects that a relation is to
BACKGROUNDS = {"filled": (245, 245, 245), "outlined": (245, 245, 245), "dark": (40, 40, 50)}
LINE = 2  # width of outlines, in pixels
PLACES = 50  # attempts to place a shape
SCENES = 2000  # attempts to find a scene with a question
Box = tuple[int, int, int, int]  # left, top, right, bottom; right and bottom are exclusive
Style = Literal["filled", "outlined", "dark"]
Pair = tuple[str, str]  # a color and a shape


class Shape(NamedTuple):
    """One object of a scene."""

    color: str
    shape: str
    size: str
    box: Box

    @property
    def center(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2


Scene = tuple[Shape, ...]


class Asked(NamedTuple):
    """A question with the objects of its answer."""

    text: str
    form: Literal["boxes", "points", "count"]
    objects: list[Shape]

    @property
    def answer(self) -> str:
        """The answer as the judge `boxes` reads it, objects from left to right."""
        if self.form == "count":
            return str(len(self.objects))
        ordered = sorted(self.objects, key=lambda each: each.box)
        written = [each.box if self.form == "boxes" else each.center for each in ordered]
        return " ; ".join(" ".join(f"{number:g}" for number in each) for each in written)


def ask_one(scene: Scene, verb: str = "box", form: Any = "boxes") -> Iterator[Asked]:
    """Yields questions for the only object of a color and a shape: "box the red circle"."""
    for each in scene:
        alike = [other for other in scene if other[:2] == each[:2]]
        if len(alike) == 1:
            yield Asked(f"{verb} the {each.color} {each.shape}", form, alike)


def ask_point(scene: Scene) -> Iterator[Asked]:
    """Yields questions for the center of one object: "point at the red circle"."""
    yield from ask_one(scene, "point at", "points")


def ask_size(scene: Scene) -> Iterator[Asked]:
    """Yields questions for one of several alike of two sizes: "box the small red circle"."""
    for each in scene:
        alike = [other for other in scene if other[:2] == each[:2]]
        same = [other for other in alike if other.size == each.size]
        if len(same) == 1 and len(alike) > 1:
            yield Asked(f"box the {each.size} {each.color} {each.shape}", "boxes", same)


def ask_relation(scene: Scene) -> Iterator[Asked]:
    """Yields questions for one of several of a shape: "box the circle left of the square".

    No other shape is a square, and the centers of all circles are clearly on one side of it.
    """
    for anchor in scene:
        if sum(other.shape == anchor.shape for other in scene) > 1:
            continue
        for shape in sorted({other.shape for other in scene} - {anchor.shape}):
            these = [other for other in scene if other.shape == shape]
            for relation, (axis, sign) in RELATIONS.items():
                gaps = [sign * (other.center[axis] - anchor.center[axis]) for other in these]
                true = [other for other, gap in zip(these, gaps) if gap > 0]
                if len(these) > 1 and min(map(abs, gaps)) >= MARGIN and len(true) == 1:
                    yield Asked(f"box the {shape} {relation} the {anchor.shape}", "boxes", true)


def ask_compound(scene: Scene) -> Iterator[Asked]:
    """Yields questions of many words: "box the small red circle left of the two square".

    The scene has so many squares. The object is on that side of them all. Others of its size, color
    and shape are not, and centers differ by at least MARGIN.
    """
    for anchor_shape in sorted({each.shape for each in scene}):
        anchors = [each for each in scene if each.shape == anchor_shape]
        if len(anchors) not in WORD_BY_COUNT:
            continue
        counted = f"the {WORD_BY_COUNT[len(anchors)]} {anchor_shape}"
        for kind in sorted({each[:3] for each in scene if each.shape != anchor_shape}):
            color, shape, size = kind
            alike = [each for each in scene if each[:3] == kind]
            for relation, (axis, sign) in RELATIONS.items():
                gaps = [
                    min(sign * (each.center[axis] - anchor.center[axis]) for anchor in anchors)
                    for each in alike
                ]
                true = [each for each, gap in zip(alike, gaps) if gap > 0]
                if len(alike) > 1 and min(map(abs, gaps)) >= MARGIN and len(true) == 1:
                    yield Asked(
                        f"box the {size} {color} {shape} {relation} {counted}", "boxes", true
                    )


def ask_all(scene: Scene) -> Iterator[Asked]:
    """Yields questions for several objects: "box all red", "box all circle"."""
    for word, true in _words(scene):
        if len(true) > 1:
            yield Asked(f"box all {word}", "boxes", true)


def ask_count(scene: Scene) -> Iterator[Asked]:
    """Yields questions for a number of objects: "count red", "count circle"."""
    for word, true in _words(scene):
        yield Asked(f"count {word}", "count", true)


QUESTIONS: dict[str, Callable[[Scene], Iterator[Asked]]] = {
    "one": ask_one,
    "point": ask_point,
    "size": ask_size,
    "relation": ask_relation,
    "compound": ask_compound,
    "all": ask_all,
    "count": ask_count,
}


class GroundingFamily(Strict):
    """Prompts of one kind of question and one look."""

    question: Literal["one", "point", "size", "relation", "compound", "all", "count"]
    style: Style
    min_objects: Annotated[int, Field(ge=1, le=9)]  # of a scene
    max_objects: Annotated[int, Field(ge=1, le=9)]
    warmup: Fraction  # share of the warm-up, relative to the other families; 0: the base sees none
    # known: no object is of task.held_out_pairs. held_out: the answer is; evaluation only.
    pairs: Literal["known", "held_out"]

    @model_validator(mode="after")
    def _has_a_range(self) -> "GroundingFamily":
        if self.min_objects > self.max_objects:
            raise ValueError("min_objects must be at most max_objects")
        return self


class RevisedPairs(WithOptionalKeys):
    """Warm-up pairs that ask to revise an answer, as `revise_first_answers` will."""

    share: Fraction  # of the warm-up's pairs
    right: Fraction  # of them: the first answer is right
    shift: Positive  # pixels, at most; a wrong first answer has an object that is moved
    # varied: drawn from another object, another place and another size, as policies err. None:
    # another place, also off the grid of right answers.
    errors: Literal["varied"] | None = None
    template: Annotated[str, Field(min_length=1)]  # as in the arm's selection

    @field_validator("template")
    @classmethod
    def _has_a_place(cls, template: str) -> str:
        if ANSWER not in template:
            raise ValueError(f"must hold {ANSWER}, the place of the first answer, got {template!r}")
        return template

    @model_validator(mode="after")
    def _can_move(self) -> "RevisedPairs":
        if self.errors and self.shift < GRID:
            raise ValueError(f"shift must be at least {GRID} with errors, got {self.shift}")
        return self


class GroundingTask(Task):
    """Scenes of shapes with referring expressions; no scene is in two parts."""

    prompt_kinds = ("image",)

    kind: Literal["grounding"]
    train_prompts: Positive
    eval_prompts: Positive
    pixels: Annotated[int, Field(ge=32, le=512)]  # side of an image
    instruction: str  # appended to every question, e.g. the form of an answer
    held_out_pairs: list[str]  # "red circle": in no scene of training and warm-up
    revised_pairs: RevisedPairs | None  # None: the base is not taught to revise
    families: dict[Name, GroundingFamily] = Field(min_length=1)

    @field_validator("held_out_pairs")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        known = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
        for each in pairs:
            if each not in known:
                raise ValueError(f"must hold pairs such as {known[0]!r}, got {each!r}")
        return pairs

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns prompts of every family in equal shares; held-out pairs are in evaluation only.

        Raises:
          ParameterError: If a family has no prompts, or the warm-up's parameters are of another
            task.
        """
        require_pairs(inputs, self.kind)
        maker = _Maker(self, random.Random(inputs.seed))
        everywhere = [name for name, each in self.families.items() if each.pairs == "known"]
        if not everywhere:
            raise ParameterError(
                f"{PARAMS}: task.families must have a family with pairs known, for training"
            )
        evaluation = maker.ask("eval", self._divide(self.eval_prompts, [*self.families]))
        train = maker.ask("train", self._divide(self.train_prompts, everywhere))
        pairs = train[:0]  # none for an imported base
        if inputs.warmup:
            pairs = maker.ask("warmup", self._weigh(inputs.warmup.prompts, everywhere))
            pairs = self._add_revisions(pairs, random.Random(f"{inputs.seed} revised"))
        return PromptTables(train, evaluation, as_solutions(pairs))

    def _add_revisions(self, pairs: pd.DataFrame, chooser: random.Random) -> pd.DataFrame:
        """Returns warm-up pairs of which some ask to revise a first answer."""
        revised = self.revised_pairs
        if revised is None:
            return pairs
        chosen = chooser.sample(range(len(pairs)), round(revised.share * len(pairs)))
        prompts = pairs["prompt"].tolist()
        for row in chosen:
            answer = pairs["answer"].iloc[row]
            if chooser.random() >= revised.right:
                if revised.errors is None:
                    answer = spoil(answer, self.pixels, revised.shift, chooser)
                else:
                    entry = json.loads(pairs["entry"].iloc[row])
                    answer = spoil_as_policies(answer, entry, revised.shift, chooser)
            prompts[row] += revised.template.replace(ANSWER, answer)
        return pairs.assign(prompt=prompts)

    def _divide(self, count: int, names: Sequence[str]) -> dict[str, int]:
        return dict(zip(sorted(names), shares(count, len(names))))

    def _weigh(self, count: int, names: Sequence[str]) -> dict[str, int]:
        """Returns the number of warm-up prompts per family."""
        total = sum(self.families[name].warmup for name in names)
        if not total:
            raise ParameterError(
                f"{PARAMS}: task.families must have a family with pairs known and warmup above 0"
            )
        counts = {name: round(count * self.families[name].warmup / total) for name in names}
        if not any(counts.values()):
            raise ParameterError(
                f"{PARAMS}: policy.base.warmup.prompts must be larger, got {count}: no family of "
                "task.families gets one"
            )
        return counts


class _Maker:
    """Makes prompts; no scene is made twice."""

    def __init__(self, task: GroundingTask, chooser: random.Random) -> None:
        self._task = task
        self._chooser = chooser
        self._seen: set[frozenset[Shape]] = set()
        held: list[Any] = [tuple(each.split()) for each in task.held_out_pairs]
        self._held: set[Pair] = {*held}
        self._known = [
            (color, shape)
            for color in COLORS
            for shape in SHAPES
            if (color, shape) not in self._held
        ]

    def ask(self, part: str, quotas: dict[str, int]) -> pd.DataFrame:
        """Returns a table of schema PROMPTS with some prompts per family."""
        rows = [self._row(part, name, index) for name in quotas for index in range(quotas[name])]
        return pd.DataFrame(rows)

    def _row(self, part: str, name: str, index: int) -> dict[str, Any]:
        family, pixels = self._task.families[name], self._task.pixels
        scene, asked = self._find(name, family)
        entry = {
            "form": asked.form,
            "pixels": pixels,
            "boxes": [each.box for each in asked.objects],
            "objects": [each._asdict() for each in scene],
        }
        return {
            "prompt_id": f"{part}-{name}-{index:06d}",
            "family": name,
            "prompt": join_prompt(
                draw_scene(scene, family.style, pixels), asked.text + self._task.instruction
            ),
            "answer": asked.answer,
            "entry": json.dumps(entry),
        }

    def _find(self, name: str, family: GroundingFamily) -> tuple[Scene, Asked]:
        """Returns a new scene with a question of a family."""
        wants_held = family.pairs == "held_out"
        for _ in range(SCENES):
            scene = self._place(
                self._chooser.randint(family.min_objects, family.max_objects), wants_held
            )
            if frozenset(scene) in self._seen:
                continue
            questions = [
                asked
                for asked in QUESTIONS[family.question](scene)
                if not wants_held or any(each[:2] in self._held for each in asked.objects)
            ]
            if questions:
                self._seen.add(frozenset(scene))
                return scene, self._chooser.choice(questions)
        raise ParameterError(
            f"{PARAMS}: task.families.{name} must have scenes with a question "
            f"{family.question!r}, found none in {SCENES}; allow more objects, or more pixels"
        )

    def _place(self, count: int, wants_held: bool) -> Scene:
        """Returns a scene of up to `count` shapes without overlap, the first of a held-out pair."""
        shapes: list[Shape] = []
        for index in range(count):
            pairs = sorted(self._held) if wants_held and index == 0 else self._known
            # Later shapes often repeat a color or a shape, or are alike: these make questions hard.
            if shapes and self._chooser.random() < 0.5:
                like = self._chooser.choice(shapes)
                part = self._chooser.randrange(2)
                pairs = [each for each in pairs if each[part] == like[part]] or pairs
            if not pairs:
                return ()
            color, shape = self._chooser.choice(pairs)
            size = self._chooser.choice([*SIDES])
            if placed := self._find_place(self._chooser.choice(SIDES[size]), shapes):
                shapes.append(Shape(color, shape, size, placed))
        return tuple(shapes)

    def _find_place(self, side: int, shapes: Sequence[Shape]) -> Box | None:
        """Returns a box that keeps its distance from all shapes; None if none is found."""
        last = (self._task.pixels - side) // GRID
        for _ in range(PLACES):
            left, top = (GRID * self._chooser.randint(0, last) for _ in range(2))
            box = (left, top, left + side, top + side)
            if all(_are_apart(box, other.box) for other in shapes):
                return box
        return None


def spoil(answer: str, pixels: int, shift: int, chooser: random.Random) -> str:
    """Returns a near miss of the same form: one object is moved, or the count is off by one.

    Args:
      pixels: Side of the image, in which objects stay.
      shift: Largest move in pixels, to the side and up or down.
    """
    objects = [[float(number) for number in each.split()] for each in answer.split(";")]
    wrong = chooser.choice(objects)
    if len(wrong) == 1:
        return str(int(wrong[0]) + (chooser.choice((-1, 1)) if wrong[0] > 1 else 1))
    moves = [0.0, 0.0]
    while not any(moves):
        moves = [
            min(max(chooser.randint(-shift, shift), -low), pixels - high)
            for low, high in zip(wrong[:2], wrong[-2:])
        ]
    wrong[:] = [number + moves[index % 2] for index, number in enumerate(wrong)]
    return " ; ".join(" ".join(f"{number:g}" for number in each) for each in objects)


def spoil_as_policies(
    answer: str, entry: dict[str, Any], shift: int, chooser: random.Random
) -> str:
    """Returns a wrong answer of the same form, of numbers that right answers have.

    Of one object: another object of the scene that is not in the answer, or it is moved on the
    grid, or moved and of another size. Or the count is off by one.

    Args:
      entry: Of the prompt, with all objects of its scene.
      shift: Largest move in pixels, to the side and up or down.
    """
    if entry["form"] == "count":
        return spoil(answer, entry["pixels"], shift, chooser)
    shapes = [Shape(**{**each, "box": tuple(each["box"])}) for each in entry["objects"]]
    right = [each for each in shapes if [*each.box] in entry["boxes"]]
    wrong = chooser.choice(right)
    others = [each for each in shapes if each not in right]
    error = chooser.choice(["place", "size", *(["object"] if others else [])])
    if error == "object":
        box = chooser.choice(others).box
    else:
        box = _move(wrong.box, entry["pixels"], shift, error == "size", chooser)
    objects = [wrong._replace(box=box), *(each for each in right if each != wrong)]
    return Asked("", entry["form"], objects).answer


def _move(box: Box, pixels: int, shift: int, is_resized: bool, chooser: random.Random) -> Box:
    """Returns another box on the grid, within the image."""
    sides = sorted(side for each in SIDES.values() for side in each)
    while True:
        left, top = (
            each + GRID * chooser.randint(-shift // GRID, shift // GRID) for each in box[:2]
        )
        side = box[2] - box[0]
        if is_resized:
            side = chooser.choice([each for each in sides if each != side])
        moved = (left, top, left + side, top + side)
        if moved != box and min(moved) >= 0 and max(moved) <= pixels:
            return moved


def draw_scene(scene: Scene, style: Style, pixels: int) -> bytes:
    """Returns the image of a scene as PNG.

    Raises:
      MissingExtraError: If Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: task.kind grounding needs Pillow; run pip install -e '.[vision_language]'"
        ) from None

    image = Image.new("RGB", (pixels, pixels), BACKGROUNDS[style])
    pen = ImageDraw.Draw(image)
    for each in scene:
        _draw_shape(pen, each, style)
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _draw_shape(pen: Any, each: Shape, style: Style) -> None:
    """Draws a shape, which touches all sides of its box."""
    left, top, right, bottom = each.box
    right, bottom = right - 1, bottom - 1  # the last pixel that is drawn
    color = COLORS[each.color]
    look = {"outline": color, "width": LINE} if style == "outlined" else {"fill": color}
    if each.shape == "circle":
        pen.ellipse((left, top, right, bottom), **look)
    elif each.shape == "square":
        pen.rectangle((left, top, right, bottom), **look)
    elif each.shape == "triangle":
        pen.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], **look)
    else:
        third = (right - left + 1) // 3
        rows = (top, top + third, bottom - third, bottom)
        columns = (left, left + third, right - third, right)
        corners = [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2)]
        corners += [(3 - column, 3 - row) for column, row in corners]
        pen.polygon([(columns[column], rows[row]) for column, row in corners], **look)


def _words(scene: Scene) -> Iterator[tuple[str, list[Shape]]]:
    """Yields the colors and shapes of a scene with the objects that have them."""
    for part in range(2):
        for word in sorted({str(each[part]) for each in scene}):
            yield word, [each for each in scene if each[part] == word]


def _are_apart(one: Box, other: Box) -> bool:
    return any(
        one[axis + 2] + GAP <= other[axis] or other[axis + 2] + GAP <= one[axis] for axis in (0, 1)
    )
