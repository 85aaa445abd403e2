"""The machine as parameters describe it, made ready."""

import ctypes
import os
import platform
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
import transformers
from torch.utils import deterministic

from grpo.errors import ParameterError
from grpo.schema import PARAMS, Machine

# glibc's parameters of mallopt, and a size that nothing reaches.
TRIM_THRESHOLD, MMAP_THRESHOLD, NEVER = -1, -3, 2**31 - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prepare_machine(machine: Machine) -> None:
    """Sets torch up so that the same inputs give the same bytes on the same machine.

    Raises:
      ParameterError: If machine.device is cuda and there is none, or machine.compile is true and
        there is nothing to compile with.
    """
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"{PARAMS}: machine.device cuda needs a GPU, found none; set cpu")
    if machine.compile:
        _require_compiler()
        # Dynamo looks at it on the keys and values of shared prompts.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    _keep_freed_memory()
    torch.set_num_threads(machine.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # No pass reads memory before it is written, so none need be filled for that.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _keep_freed_memory() -> None:
    """Lets a pass use what the last one freed: else pages go back and come again, cleared."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for parameter in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            library.mallopt(parameter, NEVER)


def _require_compiler() -> None:
    """Raises ParameterError unless torch.compile finds what it calls: a compiler and headers."""
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    wanted = {f"a C++ compiler, {compiler}": shutil.which(compiler), f"{header}": header.exists()}
    for what, found in wanted.items():
        if not found:
            raise ParameterError(
                f"{PARAMS}: machine.compile true needs {what}, found none; install it or set false"
            )
