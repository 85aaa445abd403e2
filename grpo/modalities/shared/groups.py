"""Groups of a stored batch: prompts are stored in the order in which their groups first appear."""

import torch
from jaxtyping import Int
from torch import Tensor


def order_of_appearance(group: Int[Tensor, " rollout"]) -> Int[Tensor, " rollout"]:
    """Returns 0 for the first group that appears, 1 for the second, and so on."""
    _, index = torch.unique(group, return_inverse=True)
    size = int(index.max()) + 1
    first = torch.full((size,), len(group)).scatter_reduce(
        0, index, torch.arange(len(group)), "amin"
    )
    return first.argsort().argsort()[index]
