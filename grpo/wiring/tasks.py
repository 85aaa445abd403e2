"""Construction of prompts from parameters."""

from pathlib import Path

import pandas as pd

from grpo.errors import GrpoError, ParameterError, brief
from grpo.params.parameters import Parameters
from grpo.runtime.artifacts.tables import PROMPTS, WARMUP
from grpo.runtime.plugins import call_plugin, is_plugin
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.tasks.base import PromptTables, Task, TaskInputs


def build_prompts(params: Parameters, data: Path) -> PromptTables:
    """Returns the prompts of the task, and solutions for the warm-up if the base is fresh.

    Every prompt_id starts with "train-" or "eval-", also if the task's do not.

    Raises:
      ParameterError: If the parameters cannot be satisfied, or a task of one's own evaluates on
        prompts of training.
      ArtifactError: If a file of prompts is broken.
    """
    tables = make_tables(
        params.task,
        TaskInputs(
            seed=derive_seed(params.seed, "prompts") % 2**31,
            data=data,
            warmup=params.policy.warmup,
            takes_messages=params.modality.takes_messages(params.policy),
        ),
    )
    both = {*tables.train["prompt"]} & {*tables.eval["prompt"]}
    if both:
        raise ParameterError(
            f"{PARAMS}: task.kind {params.task.kind} must evaluate on other prompts than it trains "
            f"on, {brief(repr(min(both)))} is in both tables"
        )
    return tables._replace(
        train=_with_part(tables.train, "train"), eval=_with_part(tables.eval, "eval")
    )


def make_tables(task: Task, inputs: TaskInputs) -> PromptTables:
    """Returns the tables of a task.

    Raises:
      AbsentError: If a file is missing.
      ParameterError: If the parameters cannot be satisfied, or a task of one's own raises or
        returns something else.
      ArtifactError: If a file of prompts is broken.
    """
    if not is_plugin(task.kind):
        return task.make_prompts(inputs)
    try:
        tables = call_plugin(task.make_prompts, inputs)
    except GrpoError:
        raise
    except ValueError as error:
        raise ParameterError(f"{PARAMS}: task: {brief(error)}") from None
    if not isinstance(tables, PromptTables):
        raise ParameterError(
            f"{PARAMS}: task.kind {task.kind}: make_prompts must return PromptTables, returns "
            f"{type(tables).__name__}"
        )
    schemas = [PROMPTS, PROMPTS, *([] if inputs.warmup is None else [WARMUP])]
    for name, table, schema in zip(tables._fields, tables, schemas):
        columns = [*table] if isinstance(table, pd.DataFrame) else []
        missing = [each for each in schema.columns if each not in columns]
        if missing:
            raise ParameterError(
                f"{PARAMS}: task.kind {task.kind}: {name} of make_prompts must be a table with a "
                f"column {missing[0]}, has {columns}"
            )
        for column in schema.columns:
            wrong = [each for each in table[column] if not isinstance(each, str)]
            if wrong:
                raise ParameterError(
                    f"{PARAMS}: task.kind {task.kind}: {name} of make_prompts must have texts in "
                    f"the column {column}, has {brief(repr(wrong[0]))}"
                )
    for part in ("train", "eval"):
        wanted, made = getattr(task, f"{part}_prompts", 1), len(getattr(tables, part))
        if isinstance(wanted, int) and made < wanted:
            raise ParameterError(
                f"{PARAMS}: task.kind {task.kind}: make_prompts must return {wanted} prompts for "
                f"{part}, returns {made}; widen the task's ranges or ask for fewer"
            )
    return tables


def _with_part(prompts: pd.DataFrame, part: str) -> pd.DataFrame:
    """Returns prompts whose ids start with the name of their part."""
    ids = prompts["prompt_id"]
    named = ids.where(ids.str.startswith(f"{part}-"), f"{part}-" + ids)
    return prompts.assign(prompt_id=named)
