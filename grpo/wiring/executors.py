"""Construction of executors from parameters, and the setup that their workers receive."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import Parameters
from grpo.runtime.artifacts.files import CODE, digest
from grpo.runtime.executors.base import Executor, Local, Work
from grpo.runtime.executors.gpus import visible_gpus
from grpo.runtime.executors.processes import ProcessPool
from grpo.schema import PARAMS, Positive, Strict

Make = Callable[[str], Work]  # a module-level function that takes a setup as JSON


def _digest_code() -> str:
    return digest(CODE)


class Setup(Strict):
    """The setup of a worker, as plain data."""

    params: Parameters  # as the stage read them: the file may have changed since
    code: str = Field(default_factory=_digest_code)
    policies_per_host: Positive = 1  # number of workers that share a host's processors


SetupT = TypeVar("SetupT", bound=Setup)


@contextmanager
def open_executor(make: Make, setup: Setup) -> Iterator[Executor]:
    """Yields the executor that `sampling.executor` names; its workers end with the block.

    Raises:
      ParameterError: If every worker needs a GPU and there are too few.
      WorkerError: If no Ray cluster answers at RAY_ADDRESS.
      MissingExtraError: If the executor is Ray and Ray is not installed.
    """
    with EXECUTORS[setup.params.sampling.executor](make, setup) as executor:
        yield executor


def receive(kind: type[SetupT], line: str) -> SetupT:
    """Returns the setup that a stage sent as a line of JSON.

    Raises:
      ArtifactError: If the code of the stage differs from the code of this worker.
    """
    setup = kind.model_validate_json(line)
    if setup.code != _digest_code():
        raise ArtifactError(
            f"{Path.cwd()}: grpo/ and stages/ must be those that the stage started with; rerun it, "
            "and give every host the same files"
        )
    return setup


@contextmanager
def _in_this_process(make: Make, setup: Setup) -> Iterator[Executor]:
    yield Local(make(setup.model_dump_json()))


@contextmanager
def _on_processes(make: Make, setup: Setup) -> Iterator[Executor]:
    workers, gpus = setup.params.sampling.workers, _gpus_of_workers(setup.params)
    environments = [_environment(setup.params) for _ in range(workers)]
    for environment, gpu in zip(environments, gpus):
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with ProcessPool(_address(make), _shared(setup, workers), environments) as executor:
        yield executor


@contextmanager
def _on_ray(make: Make, setup: Setup) -> Iterator[Executor]:
    # Imported here: Ray is an optional package, and its import takes a second.
    from grpo.runtime.executors.ray_cluster import ADDRESS, RayPool, connected

    params = setup.params
    workers, threads = params.sampling.workers, params.machine.threads
    gpus = () if ADDRESS else _gpus_of_workers(params)
    per_host = len(gpus) * _gpus_per_worker(params)
    with connected(processors=workers * threads, gpus=per_host) as hosts:
        pool = RayPool(
            _address(make),
            _shared(setup, -(-workers // hosts)),
            workers=workers,
            needs={"num_cpus": threads, "num_gpus": _gpus_per_worker(params)},
            environment={**_environment(params), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with pool as executor:
            yield executor


EXECUTORS = {"local": _in_this_process, "processes": _on_processes, "ray": _on_ray}


def _address(make: Make) -> str:
    return f"{make.__module__}:{make.__name__}"


def _shared(setup: Setup, policies_per_host: int) -> str:
    return setup.model_copy(update={"policies_per_host": policies_per_host}).model_dump_json()


def _environment(params: Parameters) -> dict[str, str]:
    """Returns the environment of a worker: results may depend on the number of threads."""
    return {"OMP_NUM_THREADS": str(params.machine.threads)}


def _gpus_per_worker(params: Parameters) -> int:
    if params.machine.device != "cuda":
        return 0
    return params.modality.gpus_per_sampler(params.policy)


def _gpus_of_workers(params: Parameters) -> tuple[str, ...]:
    """Returns the entry of CUDA_VISIBLE_DEVICES of each worker, without a GPU in common.

    Raises:
      ParameterError: If there are too few GPUs.
    """
    each, workers = _gpus_per_worker(params), params.sampling.workers
    if each == 0:
        return ()
    gpus = visible_gpus()
    if len(gpus) < each * workers:
        shared = f" divided by the {each} of a sampler" if each > 1 else ""
        raise ParameterError(
            f"{PARAMS}: sampling.workers must be at most {len(gpus) // each}, the GPUs that this "
            f"stage may use{shared}, got {workers}; lower it, or give the stage more: under flows "
            "by meta.exec.gpu in dvc.yaml"
        )
    return tuple(",".join(gpus[each * n : each * (n + 1)]) for n in range(workers))
