"""Distributed training: start and end of ranks, sharding of weights (FSDP2), and reductions.

Without `process_group` there is a single rank, and reductions return their input.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from grpo.errors import (
    ArtifactError,
    GrpoError,
    ParameterError,
    RetryableError,
    WorkerError,
    brief,
)
from grpo.runtime.artifacts.files import digest, refused_by_the_system
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.process import die_with_parent
from grpo.schema import PARAMS

LONGEST_WAIT = timedelta(minutes=30)  # for the slowest rank, e.g. rank 0 while it writes weights
WORD = 2**32
EXIT_WRONG_INPUT = 2  # a rank that has sent a user-facing error to its parent
EXIT_RETRYABLE = 4  # the same, of an error after which a rerun may succeed
EXIT_LOST_OTHERS = 3  # a rank that cannot reach another rank, usually because that one has ended
TRANSPORTS = ("gloo", "NCCL")  # as named in their error messages
Result = TypeVar("Result")


@contextmanager
def process_group(number: int, device: str, *, store: Path) -> Iterator[None]:
    """Initializes torch.distributed for `number` ranks; on cuda each rank has its own GPU.

    Args:
      store: File for the rendezvous of the ranks of one machine; unused under torchrun.

    Raises:
      ParameterError: If the number of started ranks differs, or there is no GPU for this rank.
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
    """Returns this process's rank; rank 0 writes the outputs."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Returns the world size."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(own: Tensor) -> Tensor:
    """Returns the sum over ranks of a CPU tensor."""
    return _reduce(own, dist.ReduceOp.SUM)


def sum_numbers(own: Sequence[float]) -> list[float]:
    """Returns the sum over ranks of each number, in float64."""
    return [float(each) for each in all_reduce_sum(torch.tensor(own, dtype=torch.float64))]


def sum_counts(own: Sequence[int]) -> list[int]:
    """Returns the sum over ranks of each count, of any size: FLOPs can exceed 64 bits."""
    words = torch.tensor([word for count in own for word in divmod(count, WORD)])
    high, low = all_reduce_sum(words).view(-1, 2).T.tolist()
    return [upper * WORD + lower for upper, lower in zip(high, low)]


def all_reduce_max(own: Sequence[float]) -> list[float]:
    """Returns the maximum over ranks of each number."""
    largest = _reduce(torch.tensor(own, dtype=torch.float64), dist.ReduceOp.MAX)
    return [float(each) for each in largest]


def all_agree(holds: bool) -> bool:
    """Returns whether `holds` is true on every rank."""
    return all_reduce_max([float(not holds)]) == [0.0]


def all_texts(own: str) -> list[str]:
    """Returns each rank's text, by rank."""
    if num_ranks() == 1:
        return [own]
    content = own.encode()
    length = int(all_reduce_max([float(len(content))])[0])
    padded = torch.tensor([*content, *bytes(length - len(content))], dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(num_ranks())]
    dist.all_gather(found, padded)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in found]


def require_same(what: str, value: Any) -> None:
    """Raises ArtifactError unless a value is the same on all ranks, which may be on many hosts."""
    number = float(int(digest([], value)[:12], 16))
    if all_reduce_max([number, -number]) != [number, -number]:
        raise ArtifactError(
            f"{what} must be the same for all ranks, rank {this_rank()} has {value}; "
            "start all of them with the same commit and inputs"
        )


def _reduce(own: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    if num_ranks() == 1:
        return own
    result = own.clone()
    dist.all_reduce(result, op=how)
    return result


def run_in_ranks(
    number: int,
    work: Callable[[Usage], None],
    usage: Usage,
    *,
    store: Path,
) -> None:
    """Runs `work` in `number` ranks; in this process for one rank or under torchrun.

    The ranks are forks of this process and share its imports.

    Args:
      store: File for the rendezvous of the ranks.

    Raises:
      GrpoError: A user-facing error that a rank reports; a RetryableError stays one.
      WorkerError: If a rank is killed or fails; the other ranks are then killed.
    """
    if number == 1 or "RANK" in os.environ:
        work(usage)
        return
    store.unlink(missing_ok=True)
    context, here = multiprocessing.get_context("fork"), os.getpid()
    processes, listeners = [], []
    for rank in range(number):
        listener, speaker = context.Pipe(duplex=False)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
        process = context.Process(
            target=_run_rank, args=(own, here, work, usage, speaker), daemon=True
        )
        process.start()
        speaker.close()
        processes.append(process)
        listeners.append(listener)
    codes, said = _wait_for_ranks(processes, listeners)
    store.unlink(missing_ok=True)
    for message, code in zip(said, codes):
        if code in (EXIT_WRONG_INPUT, EXIT_RETRYABLE):
            kind = RetryableError if code == EXIT_RETRYABLE else GrpoError
            raise kind(message)
    if any(codes):
        raise WorkerError(_describe_loss(codes, said))
    parts, spans = json.loads(said[0])
    usage.seconds_by_part |= parts
    usage.spans += spans


def _run_rank(
    own: dict[str, str],
    parent: int,
    work: Callable[[Usage], None],
    usage: Usage,
    speaker: Connection,
) -> None:
    """Runs `work` as one rank; sends a user-facing error or the seconds by part to the parent."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the parent, which stops its ranks
    # Ranks listen on loopback only: other hosts must not reach them.
    os.environ |= {**own, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.pop("MASTER_ADDR", None)  # of a torchrun that did not start these ranks
    try:
        with refused_by_the_system():
            work(usage)
    except GrpoError as error:
        speaker.send_bytes(str(error).encode())
        sys.exit(EXIT_RETRYABLE if isinstance(error, RetryableError) else EXIT_WRONG_INPUT)
    except RuntimeError as error:
        if not any(name in str(error) for name in TRANSPORTS):
            raise
        speaker.send_bytes(brief(error).encode())
        sys.exit(EXIT_LOST_OTHERS)
    speaker.send_bytes(json.dumps([usage.seconds_by_part, usage.spans]).encode())


def _wait_for_ranks(
    processes: Sequence[ForkProcess], listeners: Sequence[Connection]
) -> tuple[list[int], list[str]]:
    """Waits for all ranks, or for a failure; then kills the rest (code 0).

    Returns:
      The exit codes, and what each rank sent, which is read while ranks run: a rank does not end
      before that if it is more than a pipe holds.
    """
    said: dict[Connection, str] = {}
    try:
        while running := [each.sentinel for each in processes if each.exitcode is None]:
            if any(each.exitcode for each in processes):
                break
            silent = [each for each in listeners if each not in said]
            ready = wait([*running, *silent])
            said |= {each: _receive(each) for each in silent if each in ready}
        codes = [each.exitcode or 0 for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.join()
    return codes, [said[each] if each in said else _receive(each) for each in listeners]


def _receive(listener: Connection) -> str:
    """Returns the message of a rank; empty if it ended without one."""
    try:
        return listener.recv_bytes().decode()
    except (EOFError, OSError):
        return ""


def _describe_loss(codes: Sequence[int], said: Sequence[str]) -> str:
    """Returns which rank failed and how; prefers a rank that did not fail because of another."""
    found = [rank for rank, code in enumerate(codes) if code]
    rank = next((each for each in found if codes[each] != EXIT_LOST_OTHERS), found[0])
    if codes[rank] < 0:
        how = f"was killed by {signal.Signals(-codes[rank]).name}"
    elif codes[rank] == EXIT_LOST_OTHERS:
        how = f"lost the others ({said[rank]})"
    else:
        how = "failed"
    return (
        f"rank {rank} of {len(codes)} {how}, and all ranks were stopped; run the stage again, it "
        "resumes from its last checkpoint"
    )


class _Pass(nn.Module):
    """Wraps any computation with a model as a `forward`, which is where FSDP2 gathers weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


def shard(model: PreTrainedModel, device: str) -> Callable[[Callable[[], Result]], Result]:
    """Shards a model's weights over the ranks (FSDP2); returns a wrapper for forward passes.

    Blocks (`_no_split_modules`) are gathered one at a time; embeddings and head stay gathered
    during the pass. Between passes no rank holds full weights. All ranks must run the same number
    of passes through the same number of blocks.
    """
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device, (num_ranks(),)),
        "reshard_after_forward": True,
        # Sums over many ranks need more precision than the computation of one rank.
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=torch.promote_types(model.dtype, torch.float32)
        ),
    }
    blocks = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, **settings)
    root: Any = fully_shard(_Pass(model), **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over rollouts, so gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # experts that receive no token on some rank
    run: Callable[[Callable[[], Result]], Result] = root
    return run


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor, present on every rank, sharded like `like` and on its device."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gather_to_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the full tensors on CPU on rank 0, and an empty dict on the other ranks."""
    kept = {}
    for name, tensor in tensors.items():
        together = full_tensor(tensor.detach())  # every rank receives it
        if this_rank() == 0:
            kept[name] = together.cpu()
    return kept


def gather_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copies the full tensors into the targets of this rank, if any; all ranks must call it."""
    for name, tensor in tensors.items():
        together = full_tensor(tensor.detach())  # every rank receives it
        if name in targets:
            targets[name].copy_(together)


def is_first_of_host() -> bool:
    """Returns whether no other rank on this host has a lower number."""
    return num_ranks() == 1 or os.environ["LOCAL_RANK"] == "0"
