"""The judge of grounding that also tells apart answers which miss: 1 - their distance.

The IoU of all boxes that miss is 0; their distances differ. It is the error of Group Revision.
"""

from grpo.rewards.base import AnswerJudge, Judge, JudgeInputs, Task
from grpo.rewards.boxes import (
    FORMS,
    centers,
    consolidated_error,
    distance,
    judge_objects,
    mean_error,
    read_answer,
)


def load(inputs: JudgeInputs) -> AnswerJudge:
    """Returns the judge."""
    return judge_distance


def judge_distance(answer: str, task: Task) -> float:
    """Returns 1 - `consolidated_error` of boxes, 1 - the mean distance of points to the centers.

    A count is right or wrong, as in the judge `boxes`. `entry["pixels"]` is the side of the image.

    Raises:
      ValueError: If the answer does not have the form.
    """
    boxes, given = read_answer(answer, task)
    pixels = int(str(task.entry["pixels"]))
    if given.shape[1] == FORMS["count"]:
        return judge_objects(answer, task)
    if given.shape[1] == FORMS["boxes"]:
        return 1 - consolidated_error(boxes, given, pixels=pixels)
    return 1 - mean_error(distance(centers(boxes), given, pixels))


JUDGE = Judge(reads="text", load=load, needs_task="grounding")
