"""Tasks, the sources of prompts, one file each, named as `task.kind`."""

import sys
from types import ModuleType
from typing import Any, get_args

from grpo.errors import ParameterError, brief
from grpo.runtime.lookup import import_part, missing_part, part_names
from grpo.runtime.plugins import import_plugin, is_plugin
from grpo.tasks.base import PromptKind, Task


def task_kinds() -> tuple[str, ...]:
    """Returns all values of task.kind."""
    return part_names(sys.modules[__name__])


def find_task(kind: str) -> type[Task]:
    """Returns the task class of a kind in `task_kinds`, or at a dotted path under plugins/.

    Raises:
      ParameterError: If its file defines none.
    """
    if is_plugin(kind):
        return _find_own(kind)
    module = import_part(sys.modules[__name__], kind)
    found = _tasks_in(module)
    if not found:
        raise missing_part(module, "a subclass of Task")
    return found[0]


def _find_own(kind: str) -> type[Task]:
    found: Any = import_plugin(kind)
    if isinstance(found, ModuleType):
        defined = _tasks_in(found)
        found = defined[0] if len(defined) == 1 else found
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ParameterError(f"{kind}: must be a subclass of Task, or a file that defines one")
    kinds, known = getattr(found, "prompt_kinds", None), get_args(PromptKind)
    if not isinstance(kinds, tuple) or not kinds or not {*kinds} <= {*known}:
        raise ParameterError(
            f"{kind}: prompt_kinds must be a tuple of some of {known}, got {brief(repr(kinds))}"
        )
    if found.make_prompts is Task.make_prompts:
        raise ParameterError(f"{kind}: must define make_prompts(self, inputs) -> PromptTables")
    return found


def _tasks_in(module: ModuleType) -> list[type[Task]]:
    """Returns the task classes that a module defines."""
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Task) and each.__module__ == module.__name__
    ]
