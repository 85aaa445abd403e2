"""The judge of reasoning-gym: the family's own `score_answer`."""

import re
import warnings
from functools import cache
from typing import Any

from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task

# Families whose judge passes an answer to Python's eval, some of them through sympy's parser.
EVALUATED = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
}  # fmt: skip
MATHEMATICS = {
    "Abs", "Float", "Integer", "Integral", "Rational", "abs", "acos", "asin", "atan", "cos", "cosh",
    "exp", "ln", "log", "pi", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
WORD = re.compile(r"[^\W\d]\w*")
QUOTES = {"'", '"', "\\"}


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge; imports reasoning-gym here, outside the time limit of the first text."""
    _library()
    return score_answer


def generate(family: str, *, size: int, seed: int, **difficulty: Any) -> Any:
    """Returns a data set of a family."""
    return _library().create_dataset(family, size=size, seed=seed, **difficulty)


def legs_of(animal: str) -> int:
    """Returns the legs of an animal of the family leg_counting."""
    _library()
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return int(ANIMALS[animal])


def score_answer(answer: str, task: Task) -> float:
    """Returns reasoning-gym's score of an answer, in [0, 1].

    Raises:
      ValueError: If the family's judge evaluates answers and this one calls other functions than
        MATHEMATICS.
    """
    if task.family in EVALUATED and not _is_inert(answer):
        raise ValueError(f"{task.family}: an answer must not call anything but mathematics")
    return float(_judge(task.family).score_answer(answer, task.entry))


def _is_inert(answer: str) -> bool:
    """Returns whether an answer, evaluated as Python, calls only functions in MATHEMATICS.

    An answer without parentheses calls nothing. With parentheses it may contain numbers, variables
    of one letter and MATHEMATICS, but no quotes, because sympy's S evaluates strings.
    """
    words = {word for word in WORD.findall(answer) if len(word) > 1}
    return "(" not in answer or (words <= MATHEMATICS and QUOTES.isdisjoint(answer))


@cache
def _library() -> Any:
    # Imported here: the import takes half a second, which checks of parameters do not need.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, at its first compilation
        import reasoning_gym
    return reasoning_gym


@cache
def _judge(family: str) -> Any:
    """Returns a data set of the family for its judge; entries carry the difficulty."""
    return generate(family, size=1, seed=0)


JUDGE = Judge(reads="text", load=load, needs_task="reasoning_gym")
