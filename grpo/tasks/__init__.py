"""Tasks, the sources of prompts, one file each, named as `task.kind`."""

import sys

from grpo.runtime.lookup import find_part, part_names
from grpo.tasks.base import Task


def task_kinds() -> tuple[str, ...]:
    """Returns all values of task.kind."""
    return part_names(sys.modules[__name__])


def find_task(kind: str) -> type[Task]:
    """Returns the task class of a kind in `task_kinds`.

    Raises:
      ParameterError: If its file defines none.
    """

    def is_task(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, Task)

    found: type[Task] = find_part(sys.modules[__name__], kind, is_task, "a subclass of Task")
    return found
