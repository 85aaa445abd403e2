"""Tasks, one file each, found by its name: what prompts there are."""

import sys

from grpo.runtime.lookup import import_part, part_names
from grpo.tasks.base import Task


def task_kinds() -> tuple[str, ...]:
    """Returns every task.kind."""
    return part_names(sys.modules[__name__])


def find_task(kind: str) -> type[Task]:
    """Returns the parameters of a kind that `task_kinds` lists."""
    module = import_part(sys.modules[__name__], kind)
    return next(
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Task) and each.__module__ == module.__name__
    )
