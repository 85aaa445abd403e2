"""Packed rollouts: flat tensors that can be concatenated, and the layout of their rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo.errors import ArtifactError

STEPS = "steps"  # number of steps per rollout, in every layout
PER_PROMPT = ("prompt", None)


@dataclass(frozen=True)
class Rows:
    """The owner of a stored tensor's rows and the number of rows per owner."""

    of: Literal["prompt", "rollout"]
    lengths: str | None = None  # the tensor with the number of rows; None: one row
    left_out: int = 0  # number of rows to subtract from it
    each: Literal["integer", "real"] | None = None  # type of a row; None: an array

    def per_owner(self, tensors: Mapping[str, Tensor], owners: int) -> Int[Tensor, " owner"]:
        """Returns the number of rows per prompt or rollout."""
        if self.lengths is None:
            return torch.ones(owners, dtype=torch.long)
        return tensors[self.lengths] - self.left_out


Layout = Mapping[str, Rows]  # tensor name -> rows


def require_entries(
    tensors: Mapping[str, Tensor],
    name: str,
    holds: Bool[Tensor, " entry"],
    rule: str,
    *,
    lengths: str = STEPS,
) -> None:
    """Raises ArtifactError with row and entry if an entry of a ragged tensor breaks a rule.

    Args:
      rule: The rule, to follow "must be" in the message.
      lengths: The tensor with the number of entries per row.
    """
    broken = (~holds).nonzero()
    if len(broken):
        at, ends = int(broken[0, 0]), tensors[lengths].cumsum(0)
        row = int(torch.searchsorted(ends, at, right=True))
        entry = at - (int(ends[row - 1]) if row else 0)
        raise ArtifactError(
            f"{name} of row {row}, entry {entry}, must be {rule}, "
            f"got {tensors[name][at].item():g}; rerun the stage that writes it"
        )


def prompt_rows(
    layout: Layout, tensors: Mapping[str, Tensor], group: Int[Tensor, " rollout"]
) -> Int[Tensor, " rollout"]:
    """Returns the row of each rollout's prompt; prompts are in order of first appearance.

    Args:
      group: Groups of all rollouts in the order of the rollout table.

    Raises:
      ArtifactError: If the tensors do not have the layout or are inconsistent with each other or
        with `group`.
    """
    if set(tensors) != set(layout):
        raise ArtifactError(f"must hold {sorted(layout)}, got {sorted(tensors)}")
    row = order_of_appearance(group)
    owners = {"prompt": int(row.max()) + 1, "rollout": len(row)}
    for name, rows in layout.items():
        _require_numbers(name, tensors[name], rows)
    plain = next(name for name, rows in layout.items() if (rows.of, rows.lengths) == PER_PROMPT)
    stored = {"prompt": len(tensors[plain]), "rollout": len(tensors[STEPS])}
    if stored != owners:
        raise ArtifactError(
            f"holds {stored['rollout']} rollouts of {stored['prompt']} prompts, "
            f"its table {owners['rollout']} of {owners['prompt']}"
        )
    for name, rows in layout.items():
        count = int(rows.per_owner(tensors, owners[rows.of]).sum())
        if len(tensors[name]) != count:
            raise ArtifactError(f"{name} must have {count} entries, got {len(tensors[name])}")
    return row


def _require_numbers(name: str, tensor: Tensor, rows: Rows) -> None:
    """Raises ArtifactError unless a tensor has the shape and type of the layout."""
    if rows.each is None and tensor.ndim > 0:
        return
    is_kind = tensor.is_floating_point() == (rows.each == "real")
    if tensor.ndim != 1 or not is_kind or tensor.dtype == torch.bool or tensor.is_complex():
        given = f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")
        raise ArtifactError(f"{name} must be one {rows.each} number per entry, got {given}")


def select_packed(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    group: Int[Tensor, " rollout"],
    kept: Bool[Tensor, " rollout"],
) -> dict[str, Tensor]:
    """Returns the packed tensors of some rollouts and their prompts.

    Args:
      group: Groups of all rollouts in the order of the rollout table.

    Raises:
      ArtifactError: As for `prompt_rows`.
    """
    row = prompt_rows(layout, tensors, group)
    prompts = torch.zeros(int(row.max()) + 1, dtype=torch.bool)
    prompts[row[kept]] = True
    chosen = {"prompt": prompts, "rollout": kept}
    return {
        name: tensors[name][
            chosen[rows.of].repeat_interleave(rows.per_owner(tensors, len(chosen[rows.of])))
        ]
        for name, rows in layout.items()
    }


def order_of_appearance(group: Int[Tensor, " rollout"]) -> Int[Tensor, " rollout"]:
    """Returns 0 for the first group that appears, 1 for the second, and so on."""
    _, index = torch.unique(group, return_inverse=True)
    size = int(index.max()) + 1
    first = torch.full((size,), len(group)).scatter_reduce(
        0, index, torch.arange(len(group)), "amin"
    )
    return first.argsort().argsort()[index]


def numbered(mask: Bool[Tensor, "rollout step"]) -> Int[Tensor, "rollout step"]:
    """Numbers the True entries 0, 1, ... in row-major order; -1 elsewhere."""
    number = mask.flatten().cumsum(0).view(mask.shape) - 1
    return torch.where(mask, number, -1)


def read_mask(tensors: dict[str, Tensor], *, num_steps: int) -> Bool[Tensor, "rollout step"]:
    """Returns the mask of steps with noise.

    Raises:
      ArtifactError: If a step is not before the last one or appears twice in a rollout.
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
            f"U4: group {number} has noise at different steps, so its rewards share no baseline; "
            "sample each prompt's rollouts together"
        )
