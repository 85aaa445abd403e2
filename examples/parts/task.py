"""A task: say here what its prompts ask."""

import random

import pandas as pd

from grpo.schema import Positive
from grpo.tasks.base import PromptTables, Task, TaskInputs


class MyPart(Task):
    """Sums of two numbers from 0 to `largest`, each pair at most once."""

    prompt_kinds = ("text",)

    largest: Positive
    train_prompts: Positive
    eval_prompts: Positive

    def make_prompts(self, inputs: TaskInputs) -> PromptTables:
        """Returns disjoint prompts for training and evaluation, without a warm-up."""
        pairs = [(a, b) for a in range(self.largest + 1) for b in range(self.largest + 1)]
        random.Random(inputs.seed).shuffle(pairs)
        rows = [
            {
                "prompt_id": f"sum-{a}-{b}",
                "family": "sums",
                "prompt": f"{a}+{b}=",
                "answer": str(a + b),
                "entry": "{}",
            }
            for a, b in pairs[: self.train_prompts + self.eval_prompts]
        ]
        frame = pd.DataFrame(rows)
        warmup = pd.DataFrame(columns=["prompt_id", "family", "prompt", "solution"])
        return PromptTables(frame[self.eval_prompts :], frame[: self.eval_prompts], warmup)
