"""How the commands of this package end: what a person can cause is one line and an exit code."""

import sys
from collections.abc import Callable

from flows.runner import EXIT_WRONG_INPUT, StageError
from grpo.errors import GrpoError


def exit_code(act: Callable[[], int]) -> int:
    """Returns what `act` returns; 1 after a failed stage, 2 if the input was wrong."""
    try:
        return act()
    except StageError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT if error.code == EXIT_WRONG_INPUT else 1
    except GrpoError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return EXIT_WRONG_INPUT
