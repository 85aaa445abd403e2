"""The judge of a simulator's verdict: solved or not."""

from grpo.rewards.base import Judge, Task


def read_verdict(text: str, task: Task) -> float:
    """Returns 1 for "success after 57 steps", 0 for "no success in 144 steps".

    Raises:
      RuntimeError: If the environment failed or timed out, so that there is no verdict.
    """
    if text.startswith(("failed", "timed out")):
        raise RuntimeError(text)
    return float(text.startswith("success"))


JUDGE = Judge(reads="simulation", load=lambda inputs: read_verdict)
