"""Typed parameters of where the work is done: the machine, and the workers that draw and judge."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from grpo.params.policy import Processes, Strict


class Machine(Strict):
    """Where models run; part of the parameters because other devices give other bytes."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: Annotated[int, Field(gt=0, le=1024)]  # of torch, per process
    compile: bool  # by torch.compile, what updates compute; needs a C++ compiler


class SamplingEngine(Strict):
    """Who draws and judges rollouts: no byte depends on it, so no stage runs again for it."""

    engine: Literal["local", "processes", "ray"]  # the stage itself, workers here, or on a cluster
    workers: Processes

    @field_validator("engine", mode="before")
    @classmethod
    def _is_no_sampler(cls, value: Any) -> Any:
        if value == "vllm":
            raise ValueError("must be local, processes or ray; vllm is a policy.sampler")
        return value
