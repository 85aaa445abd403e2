"""What a denoising policy did in a batch of rollouts, in memory and as it is stored."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.policies.groups import order_of_appearance
from grpo.policies.kernels import Schedule
from grpo.policies.steps import numbered, read_mask, require_equal_steps
from grpo.types import StepNoise

CONDITION = "condition."  # before the names of stored conditions
BY_ROLLOUT = ("steps", "variant", "media")
BY_DRAW = ("step_index", "before", "after", "behavior_logp")


@dataclass(frozen=True, kw_only=True)
class DenoisingTrajectory:
    """What was drawn at the steps that have noise; the others are functions of these.

    `before` and `after` hold their states, rollout by rollout: the k-th True of `mask`, row by row,
    is their row k.
    """

    group: Int[Tensor, " rollout"]  # row of `conditions`
    conditions: Mapping[str, Float[Tensor, "prompt ..."]]  # of the captions as they are
    variant: Int[Tensor, " rollout"]  # of the caption that it was drawn under; 0: as it is
    mask: Bool[Tensor, "rollout step"]
    before: Float[Tensor, " drawn *sample"]
    after: Float[Tensor, " drawn *sample"]
    noise: StepNoise  # at the steps of `mask`
    media: UInt8[Tensor, " rollout *pixels"]

    @property
    def chunks(self) -> None:
        """None: a denoising step is no chunk of actions."""
        return None

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "DenoisingTrajectory":
        """Returns some rollouts, cut after `num_steps` steps."""
        drawn = numbered(self.mask)[rows, :num_steps]
        drawn = drawn[drawn >= 0]
        return DenoisingTrajectory(
            group=self.group[rows],
            conditions=self.conditions,
            variant=self.variant[rows],
            mask=self.mask[rows, :num_steps],
            before=self.before[drawn],
            after=self.after[drawn],
            noise=self.noise.select(rows, num_steps),
            media=self.media[rows],
        )


def pack_trajectory(
    trajectory: DenoisingTrajectory, logp: Float[Tensor, "rollout step"]
) -> dict[str, Tensor]:
    """Returns a trajectory as flat tensors, which can be concatenated."""
    stored = {f"{CONDITION}{name}": each for name, each in trajectory.conditions.items()}
    return {
        **stored,
        "steps": trajectory.mask.sum(dim=1),
        "variant": trajectory.variant,
        "step_index": trajectory.mask.nonzero()[:, 1],
        "before": trajectory.before,
        "after": trajectory.after,
        "behavior_logp": logp[trajectory.mask],
        "media": trajectory.media,
    }


def repack_trajectory(
    tensors: dict[str, Tensor], row: Int[Tensor, " rollout"], kept: Bool[Tensor, " rollout"]
) -> dict[str, Tensor]:
    """Returns what `pack_trajectory` stored of some rollouts.

    Args:
      row: Of each rollout's conditions.
    """
    prompts = torch.zeros(int(row.max()) + 1, dtype=torch.bool)
    prompts[row[kept]] = True
    drawn = kept.repeat_interleave(tensors["steps"])
    return {
        name: each[prompts if name.startswith(CONDITION) else kept if name in BY_ROLLOUT else drawn]
        for name, each in tensors.items()
    }


def unpack_trajectory(
    tensors: dict[str, Tensor], row: Int[Tensor, " rollout"], schedule: Schedule
) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
    """Returns a stored trajectory and its behavior log-probs.

    Args:
      row: Of each rollout's conditions.

    Raises:
      ArtifactError: If a group has noise at different steps (rule U4).
    """
    mask = read_mask(tensors, num_steps=len(schedule.time))
    require_equal_steps(mask, row)
    trajectory = DenoisingTrajectory(
        group=row,
        conditions={
            name.removeprefix(CONDITION): each
            for name, each in tensors.items()
            if name.startswith(CONDITION)
        },
        variant=tensors["variant"],
        mask=mask,
        before=tensors["before"],
        after=tensors["after"],
        noise=schedule.noise_at(mask),
        media=tensors["media"],
    )
    return trajectory, torch.zeros(mask.shape).masked_scatter(mask, tensors["behavior_logp"])


def conditions_by_row(
    tensors: dict[str, Tensor], group: Int[Tensor, " rollout"], names: tuple[str, ...]
) -> Int[Tensor, " rollout"]:
    """Returns the row of each rollout's conditions, of tensors that were stored.

    Args:
      names: Of the conditions.

    Raises:
      ArtifactError: If the tensors are not those of `pack_trajectory` or do not fit `group`.
    """
    row = order_of_appearance(group)
    conditions = [f"{CONDITION}{name}" for name in names]
    expected = {*BY_ROLLOUT, *BY_DRAW, *conditions}
    if set(tensors) != expected:
        raise ArtifactError(f"must hold {sorted(expected)}, got {sorted(tensors)}")
    wanted = {
        **dict.fromkeys(conditions, int(row.max()) + 1),
        **dict.fromkeys(BY_ROLLOUT, len(row)),
        **dict.fromkeys(BY_DRAW, int(tensors["steps"].sum())),
    }
    for name, count in wanted.items():
        if len(tensors[name]) != count:
            raise ArtifactError(f"{name} must have {count} entries, got {len(tensors[name])}")
    return row
