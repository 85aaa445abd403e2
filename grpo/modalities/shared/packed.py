"""Rollouts as flat tensors that can be concatenated: whose rows and steps each of them holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from grpo.errors import ArtifactError

STEPS = "steps"  # by rollout, in every layout
PER_PROMPT = ("prompt", None)


@dataclass(frozen=True)
class Rows:
    """Of what a stored tensor has rows, and how many of each."""

    of: Literal["prompt", "rollout"]
    lengths: str | None = None  # the tensor that says how many; None: one
    left_out: int = 0  # rows fewer than it says
    each: Literal["integer", "real"] | None = None  # what a row is; None: an array

    def per_owner(self, tensors: Mapping[str, Tensor], owners: int) -> Int[Tensor, " owner"]:
        """Returns the number of rows of every prompt or rollout."""
        if self.lengths is None:
            return torch.ones(owners, dtype=torch.long)
        return tensors[self.lengths] - self.left_out


Layout = Mapping[str, Rows]  # by the tensor's name


def require_entries(
    tensors: Mapping[str, Tensor],
    name: str,
    holds: Bool[Tensor, " entry"],
    rule: str,
    *,
    lengths: str = STEPS,
) -> None:
    """Raises ArtifactError if an entry of a ragged tensor breaks a rule; it names row and entry.

    Args:
      rule: After "must be".
      lengths: The tensor that says how many entries each row has.
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
    """Returns the row of each rollout's prompt: prompts are stored as their groups first appear.

    Args:
      group: Of all rollouts, in the table's order.

    Raises:
      ArtifactError: If the tensors are not those of the layout, or do not fit one another or
        `group`.
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
    """Raises ArtifactError unless a tensor has a row per entry, of numbers of the layout's kind."""
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
    """Returns what is stored of some rollouts and their prompts.

    Args:
      group: Of all rollouts, in the table's order.

    Raises:
      ArtifactError: As `prompt_rows`.
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
