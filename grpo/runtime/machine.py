"""Set-up of torch from the parameters of the machine."""

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

# Parameters of glibc's mallopt, and a threshold above every allocation.
TRIM_THRESHOLD, MMAP_THRESHOLD, NEVER = -1, -3, 2**31 - 1
MAPPED_BYTES = 2**17  # of the smallest block with pages of its own: glibc's threshold at its start
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prepare_machine(machine: Machine) -> None:
    """Configures torch for reproducible results on the same machine.

    Raises:
      ParameterError: If machine.device is cuda and there is no GPU, or machine.compile is true and
        there is no compiler.
    """
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"{PARAMS}: machine.device cuda needs a GPU, found none; set cpu")
    if machine.compile:
        _require_compiler()
        # Dynamo reads .grad of the keys and values of shared prompts.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    if machine.device == "cpu" and machine.memory_gb is not None:
        _set_allocator(trim=MAPPED_BYTES, mmap=MAPPED_BYTES)
    else:
        _set_allocator(trim=NEVER, mmap=NEVER)
    torch.set_num_threads(machine.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # No operation reads uninitialized memory, so it need not be filled for determinism.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _set_allocator(*, trim: int, mmap: int) -> None:
    """Sets from which size on glibc returns freed memory to the system at once.

    Kept memory is faster to allocate again, because the kernel does not zero its pages. But small
    blocks fragment it, so that it grows beyond the memory of live tensors. Blocks with pages of
    their own do not fragment.

    Args:
      trim: Bytes of free memory at the end of the heap.
      mmap: Bytes of a block.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, trim)
        library.mallopt(MMAP_THRESHOLD, mmap)


def _require_compiler() -> None:
    """Raises ParameterError if the compiler or headers that torch.compile needs are missing."""
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    wanted = {f"a C++ compiler, {compiler}": shutil.which(compiler), f"{header}": header.exists()}
    for what, found in wanted.items():
        if not found:
            raise ParameterError(
                f"{PARAMS}: machine.compile true needs {what}, found none; install it or set false"
            )
