"""Tasks, the sources of prompts, one file each, named as `task.kind`."""

import sys

from grpo.runtime.lookup import import_part, missing_part, part_names
from grpo.tasks.base import Task


def task_kinds() -> tuple[str, ...]:
    """Returns all values of task.kind."""
    return part_names(sys.modules[__name__])


def find_task(kind: str) -> type[Task]:
    """Returns the task class of a kind in `task_kinds`.

    Raises:
      ParameterError: If its file defines none.
    """
    module = import_part(sys.modules[__name__], kind)
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, Task) and each.__module__ == module.__name__:
            return each
    raise missing_part(module, "a subclass of Task")
