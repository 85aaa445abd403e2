"""Construction of prompts from parameters."""

from pathlib import Path

from grpo.params.parameters import Parameters
from grpo.runtime.seeds import derive_seed
from grpo.tasks.base import PromptTables, TaskInputs


def build_prompts(params: Parameters, data: Path) -> PromptTables:
    """Returns the prompts of the task, and solutions for the warm-up if the base is fresh."""
    return params.task.make_prompts(
        TaskInputs(
            seed=derive_seed(params.seed, "prompts") % 2**31,
            data=data,
            warmup=params.policy.warmup,
            takes_messages=params.modality.takes_messages(params.policy),
        )
    )
