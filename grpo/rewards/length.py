"""The judge of length: against answers that are cut off or run on."""

from grpo.rewards.base import Judge, Task


def compare_lengths(answer: str, task: Task) -> float:
    """Returns shorter / longer of the lengths of answer and source, in characters.

    Ten characters of Japanese may say what thirty of English do, so scores of two languages cannot
    be compared; those of a group can.
    """
    answered, asked = len(answer), len(task.source)
    return min(answered, asked) / max(answered, asked, 1)


JUDGE = Judge(reads="text", load=lambda inputs: compare_lengths)
