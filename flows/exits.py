"""Exit codes of the commands: a user-facing error becomes one line on stderr."""

import os
import sys
from collections.abc import Callable

from flows import INTERRUPTED
from flows.runner import EXIT_WRONG_INPUT, StageError
from grpo.errors import GrpoError, ParameterError
from grpo.runtime.artifacts.files import refused_by_the_system
from grpo.runtime.process import EXIT_INTERRUPTED, raise_interrupts


def exit_code(act: Callable[[], int]) -> int:
    """Returns the result of `act`, 1 for a failed stage, 2 for wrong input, or 130 for Ctrl-C."""
    try:
        raise_interrupts()
        with refused_by_the_system():
            _require_working_directory()
            return act()
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    except StageError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT if error.code == EXIT_WRONG_INPUT else 1
    except GrpoError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return EXIT_WRONG_INPUT


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ParameterError(
            "the working directory is gone; change to the repository's root"
        ) from None
