"""Runs stages in forked processes that have torch and transformers imported: 0.5 s, not 5."""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

# `stages` is imported by each process: it records its parent. A workspace's `grpo` is this one.
# Each forked process imports the program that started it, which is pytest's: without `pytest` here,
# pytest would be imported anew in each of them.
PRELOADED = [
    "pytest",
    "torch",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "torch.utils.flop_counter",
    "jaxtyping",
    "pydantic.dataclasses",
    "reasoning_gym",
    "rich.progress",
    "ruamel.yaml",
    "matplotlib.backends.backend_svg",
    "grpo.allocation.profiling",
    "grpo.lineage.lock",
    "grpo.modalities.tokens.modality",
    "grpo.params.recorded",
    "grpo.report.figures",
    "grpo.report.page",
    "grpo.rewards.reasoning_gym",
    "grpo.runtime.curves",
    "grpo.sampling.evaluation_rollouts",
    "grpo.tasks.reasoning_gym",
    "grpo.wiring.checks",
    "grpo.wiring.later_rollouts",
    "grpo.wiring.phase_profiles",
    "grpo.wiring.rounds",
    "grpo.wiring.tasks",
    "tests.pipeline.preloaded",
]
LOG = "stderr.log"
LIMIT_SECONDS = 60.0
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(PRELOADED)


class Finished(NamedTuple):
    code: int | None
    stderr: str


def run_stage(
    workspace: Path,
    stage: str,
    command: str,
    *,
    missing: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 60,
) -> Finished:
    """Runs `python -m stages.NAME PATHS...` in a workspace, in a process without test hooks.

    Args:
      stage: DVC's name of the stage, e.g. rollout@sgpo-1.
      missing: Packages that the process must not find.
      environment: Additional environment variables.
    """
    process = start_stage(workspace, stage, command, missing=missing, environment=environment)
    process.join(timeout_seconds)
    return Finished(process.exitcode, (workspace / LOG).read_text())


def start_stage(
    workspace: Path,
    stage: str,
    command: str,
    *,
    missing: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Starts the process of `run_stage` and returns without waiting."""
    _, _, module, *paths = command.split()
    arguments = (workspace, stage, module, paths, missing, environment or {}, workspace / LOG)
    process = _forkserver.Process(target=_run, args=arguments)
    process.start()
    return process


def start_function(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Starts a function in a process without test hooks and returns without waiting."""
    process = _forkserver.Process(target=function, args=arguments)
    process.start()
    return process


def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Returns whether a process has not ended; whether its parent has asked how does not matter."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _run(
    workspace: Path,
    stage: str,
    module: str,
    paths: list[str],
    missing: tuple[str, ...],
    environment: Mapping[str, str],
    log: Path,
) -> None:
    """Sets up the child process as dvc and `python -m` do."""
    os.chdir(workspace)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= {"DVC_STAGE": stage, "CUDA_VISIBLE_DEVICES": "", **environment}
    for package in missing:
        sys.modules[package] = None  # type: ignore[assignment]
    sys.argv = [module, *paths]
    sys.path.insert(0, str(workspace))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
