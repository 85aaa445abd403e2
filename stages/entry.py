"""Entry point of stages: command-line paths, a lock, usage measurement, one-line errors."""

import gc
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from grpo.errors import ArtifactError, GrpoError, RetryableError
from grpo.params.parameters import Parameters
from grpo.params.recorded import require_own_outs, unchanged
from grpo.runtime.artifacts.files import (
    CODE,
    WORK,
    Scratch,
    digest,
    exclusive,
    refused_by_the_system,
    require_plain,
)
from grpo.runtime.artifacts.marks import marked
from grpo.runtime.artifacts.usage import Usage, measured
from grpo.runtime.process import EXIT_INTERRUPTED, die_with_parent, freeze_imports, raise_interrupts
from grpo.schema import PARAMS
from stages import INTERRUPTED, PARENT

EXIT_MAY_PASS = 1  # flows retry, as after a bug: a rerun may succeed
EXIT_WRONG_INPUT = 2


def run(main: Callable[..., None], *, stage: str) -> None:
    """Calls `main(usage, *paths)`; a GrpoError becomes one line on stderr and an exit code.

    The exit code is 1 if a rerun may succeed, and otherwise 2, after which flows do not retry. A
    bug keeps its traceback.

    Args:
      stage: Name of the module; under DVC, DVC_STAGE has the full name, e.g. rollout@sgpo-2.
    """
    die_with_parent(PARENT)
    raise_interrupts()
    if not gc.isenabled():  # disabled by stages/__init__.py
        freeze_imports()
    name = os.environ.get("DVC_STAGE", stage)
    rank = os.environ.get("RANK")  # set by torchrun
    paths = [Path(argument) for argument in sys.argv[1:]]
    expected = [name for name in inspect.signature(main).parameters if name != "usage"]
    try:
        if len(paths) != len(expected):
            raise ArtifactError(
                f"python -m stages.{stage} takes the paths {' '.join(expected)}, got {len(paths)}"
            )
        with refused_by_the_system():
            for path in [PARAMS, *paths]:
                require_plain(path)
            require_own_outs(stage, dict(zip(expected, paths)))
        held = name if rank is None else f"{name}.rank-{rank}"
        lock = exclusive(WORK / f"{held}.lock", f"stage {held}")
        spent = measured(name) if rank in (None, "0") else nullcontext(Usage())
        seen = marked(name, paths) if rank in (None, "0") else nullcontext()
        system = refused_by_the_system()
        with system, lock, seen, refused_by_the_system(), spent as usage, unchanged(name):
            main(usage, *paths)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except GrpoError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(EXIT_MAY_PASS if isinstance(error, RetryableError) else EXIT_WRONG_INPUT)


def scratch_of(stage: str, inputs: list[Path], params: Parameters) -> Scratch:
    """Returns the stage's scratch directory, keyed by the code, the inputs and the parameters.

    The section `sampling` is not part of the key: a run with another executor or number of workers
    resumes from the same batches.
    """
    deciding = params.model_dump(mode="json", exclude={"sampling": True, "machine": {"memory_gb"}})
    return Scratch(stage, digest([*CODE, *inputs], deciding))
