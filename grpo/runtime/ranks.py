"""The processes that train together: which one this is, and what all of them add up to.

Without `joined` there is one, and every function returns what it was given.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.errors import ArtifactError, ParameterError
from grpo.runtime.artifacts.files import digest
from grpo.schema import PARAMS

LONGEST_WAIT = timedelta(minutes=30)  # for the slowest rank, e.g. for the first to store weights
WORD = 2**32


@contextmanager
def joined(number: int, device: str, *, store: Path) -> Iterator[None]:
    """Within, this process is one of `number` ranks, on a GPU of its own if they are on GPUs.

    Args:
      store: The file by which ranks of one machine find each other; torchrun's have their own way.

    Raises:
      ParameterError: If other than `number` ranks were started, or there is no GPU for this one.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != number:
        raise ParameterError(
            f"{PARAMS}: training.ranks must be the number of ranks that torchrun starts, "
            f"{started}, got {number}"
        )
    if number == 1:
        yield
        return
    if device == "cuda":
        _take_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=None if "MASTER_ADDR" in os.environ else _open(store, number),
        rank=int(os.environ["RANK"]),
        world_size=number,
        timeout=LONGEST_WAIT,
    )
    yield
    dist.destroy_process_group()


def _open(path: Path, number: int) -> Any:
    store = dist.FileStore(str(path.absolute()), number)  # type: ignore[attr-defined]
    store.set_timeout(LONGEST_WAIT)
    return store


def _take_gpu(index: int) -> None:
    found = torch.cuda.device_count()
    if index >= found:
        raise ParameterError(
            f"{PARAMS}: training.ranks needs a GPU per rank of a machine, got {index + 1} ranks or "
            f"more and {found} GPUs; lower it, or raise meta.exec.gpu of train in dvc.yaml"
        )
    torch.cuda.set_device(index)


def this_rank() -> int:
    """Returns 0 for the rank that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Returns how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(own: Tensor) -> Tensor:
    """Returns the sum over ranks of a tensor on the host."""
    return _reduce(own, dist.ReduceOp.SUM)


def add_numbers(own: Sequence[float]) -> list[float]:
    """Returns the sum over ranks of each number, in float64."""
    return [float(each) for each in add_up(torch.tensor(own, dtype=torch.float64))]


def add_counts(own: Sequence[int]) -> list[int]:
    """Returns the sum over ranks of each count, however large: FLOPs outgrow 64 bits."""
    words = torch.tensor([word for count in own for word in divmod(count, WORD)])
    high, low = add_up(words).view(-1, 2).T.tolist()
    return [upper * WORD + lower for upper, lower in zip(high, low)]


def largest(own: Sequence[float]) -> list[float]:
    """Returns the largest over ranks of each number."""
    largest = _reduce(torch.tensor(own, dtype=torch.float64), dist.ReduceOp.MAX)
    return [float(each) for each in largest]


def all_agree(holds: bool) -> bool:
    """Returns whether it holds on every rank."""
    return largest([float(not holds)]) == [0.0]


def require_same(what: str, value: Any) -> None:
    """Raises ArtifactError unless a value is the same on all ranks, which may be many machines'."""
    number = float(int(digest([], value)[:12], 16))
    if largest([number, -number]) != [number, -number]:
        raise ArtifactError(
            f"{what} must be the same for all ranks, rank {this_rank()} has {value}; "
            "start all of them in one shared directory"
        )


def _reduce(own: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    if num_ranks() == 1:
        return own
    result = own.clone()
    dist.all_reduce(result, op=how)
    return result
