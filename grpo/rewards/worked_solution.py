"""The judge of worked solutions of reasoning-gym: each part of the work, and the answer."""

import re
from functools import partial

from grpo.rewards._notations import STEPS
from grpo.rewards.base import Judge, JudgeInputs, Part, PartJudge, Scored, Task
from grpo.rewards.reasoning_gym import score_answer


def load(inputs: JudgeInputs) -> PartJudge:
    """Returns the judge."""
    assert inputs.answer_pattern is not None
    return partial(score_solution, answer_pattern=inputs.answer_pattern)


def score_solution(text: str, task: Task, *, answer_pattern: str) -> Scored:
    """Returns the score of each part, 1 if it and all parts before it are right, and their mean.

    The work is the text before the last match of `answer_pattern`, split at the separator of the
    family's notation. A part of it is right if it is the part of the true solution at the same
    place. The match is the last part, right if reasoning-gym gives the answer the score 1. A text
    without a match is all work. A separator belongs to the part behind it.
    """
    notation = STEPS[task.family]
    match = next(reversed([*re.finditer(answer_pattern, text)]), None)
    work = text if match is None else text[: match.start()]
    true_parts = notation.work(task.entry).split(notation.separator)
    parts, is_right = list[Part](), True
    for place, part in enumerate(re.finditer(f"[^{notation.separator}]+", work)):
        is_right = is_right and part[0] == "".join(true_parts[place : place + 1])
        parts.append(Part(part.end(), float(is_right)))
    if match is not None and match[0]:
        is_right = is_right and score_answer(match[1].strip(), task) == 1
        parts.append(Part(match.end(), float(is_right)))
    return Scored(sum(part.score for part in parts) / max(len(parts), 1), parts)


JUDGE = Judge(
    reads="text",
    load=load,
    scores_parts=True,
    needs_task="reasoning_gym",
    task_settings={"notation": "steps"},
)
