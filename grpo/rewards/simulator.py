"""What a simulator says of a rollout in it: solved or not."""

from grpo.rewards.base import Task


def read_verdict(text: str, task: Task) -> float:
    """Returns 1 for "success after 57 steps", 0 for "no success in 144 steps".

    Raises:
      TimeoutError: If the environment did not answer in time.
      RuntimeError: If it failed.
    """
    if text.startswith("timed out"):
        raise TimeoutError(text)
    if text.startswith("failed"):
        raise RuntimeError(text)
    return float(text.startswith("success"))
