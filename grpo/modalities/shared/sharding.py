"""Weights, gradients and moments divided among ranks by FSDP2; whole only where they are needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from grpo.modalities.base import Policy
from grpo.runtime.ranks import add_counts, num_ranks, this_rank
from grpo.types import Cost

Result = TypeVar("Result")


class _Pass(nn.Module):
    """FSDP2 gathers for the forward of a module: here for anything that computes with a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


def shard(model: PreTrainedModel, device: str) -> Callable[[Callable[[], Result]], Result]:
    """Leaves each rank its share of a model's weights; returns what passes of all ranks run in.

    A block is gathered while it computes, which blocks there are says the model itself; the rest,
    embeddings and head, while the pass lasts. Between passes nothing is whole on any rank. Every
    rank must run as many passes, and through as many blocks, as every other.
    """
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device, (num_ranks(),)),
        "reshard_after_forward": True,
        # What is added up over many ranks needs more digits than what one of them computes.
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
            # The loss is a sum over all rollouts, and so is its gradient over ranks: no average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # of experts that one rank's tokens do not go to
    run: Callable[[Callable[[], Result]], Result] = root
    return run


def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor that every rank has, divided as another is, on its device."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the whole tensors on the host of the first rank, and none on the others."""
    kept = {}
    for name, tensor in tensors.items():
        together = whole(tensor.detach())
        if this_rank() == 0:
            kept[name] = together.cpu()
    return kept


@contextmanager
def counted_together(policy: Policy[Any]) -> Iterator[None]:
    """Adds what all ranks spend inside to the policy's cost, on every rank."""
    before, policy.cost = policy.cost, Cost()
    yield
    policy.cost = before + Cost(*add_counts([*vars(policy.cost).values()]))
