"""Which denoising steps of which rollout have noise, as a mask and as it is stored."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo.errors import ArtifactError


def numbered(mask: Bool[Tensor, "rollout step"]) -> Int[Tensor, "rollout step"]:
    """Returns 0, 1, ... at the True entries, row by row, and -1 elsewhere."""
    number = mask.flatten().cumsum(0).view(mask.shape) - 1
    return torch.where(mask, number, -1)


def read_mask(tensors: dict[str, Tensor], *, num_steps: int) -> Bool[Tensor, "rollout step"]:
    """Returns the steps with noise.

    Raises:
      ArtifactError: If one is not before the last step, or a rollout names one twice.
    """
    steps, index = tensors["steps"], tensors["step_index"]
    mask = torch.zeros(len(steps), num_steps, dtype=torch.bool)
    is_known = bool(((index >= 0) & (index < num_steps - 1)).all())
    if is_known:
        mask[torch.arange(len(steps)).repeat_interleave(steps), index] = True
    if not is_known or int(mask.sum()) != len(index):
        raise ArtifactError(
            f"step_index must name a rollout's steps once each, from 0 to {num_steps - 2}"
        )
    return mask


def require_equal_steps(mask: Bool[Tensor, "rollout step"], group: Int[Tensor, " rollout"]) -> None:
    """Raises ArtifactError unless the rollouts of a group have noise at the same steps."""
    first = torch.zeros(int(group.max()) + 1, dtype=torch.long)
    first[group.flip(0)] = torch.arange(len(group) - 1, -1, -1)
    differs = (mask != mask[first[group]]).any(dim=1)
    if differs.any():
        number = int(group[differs][0])
        raise ArtifactError(
            f"U4: group {number} has noise at different steps: its rewards share no baseline; "
            "sample each prompt's rollouts together"
        )
