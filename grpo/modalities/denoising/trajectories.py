"""Trajectories of denoising steps, in memory and in storage."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from grpo.modalities.denoising.sde_steps import Schedule
from grpo.modalities.shared.packed import Layout, Rows, numbered, read_mask, require_equal_steps
from grpo.types import StepNoise

CONDITION = "condition."  # prefix of stored conditions
OF_ROLLOUTS = {
    "steps": Rows("rollout", each="integer"),
    "variant": Rows("rollout", each="integer"),
    "media": Rows("rollout"),
    "step_index": Rows("rollout", "steps", each="integer"),
    "before": Rows("rollout", "steps"),
    "after": Rows("rollout", "steps"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


@dataclass(frozen=True, kw_only=True)
class DenoisingTrajectory:
    """States at the steps with noise; the other steps are deterministic.

    Row k of `before` and `after` belongs to the k-th True entry of `mask` in row-major order.
    """

    group: Int[Tensor, " rollout"]  # row of `conditions`
    conditions: Mapping[str, Float[Tensor, "prompt ..."]]  # of the unchanged captions
    variant: Int[Tensor, " rollout"]  # caption variant during sampling; 0: unchanged
    mask: Bool[Tensor, "rollout step"]
    before: Float[Tensor, " drawn *sample"]
    after: Float[Tensor, " drawn *sample"]
    noise: StepNoise  # at the steps of `mask`
    media: UInt8[Tensor, " rollout *pixels"]

    chunks = None  # the steps are not action chunks

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "DenoisingTrajectory":
        """Returns some rollouts, truncated to `num_steps` steps."""
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

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns flat tensors that can be concatenated."""
        return {
            **{f"{CONDITION}{name}": each for name, each in self.conditions.items()},
            "steps": self.mask.sum(dim=1),
            "variant": self.variant,
            "step_index": self.mask.nonzero()[:, 1],
            "before": self.before,
            "after": self.after,
            "behavior_logp": logp[self.mask],
            "media": self.media,
        }


def layout_of(conditions: tuple[str, ...]) -> Layout:
    """Returns the layout of stored rollouts with the named conditions."""
    return {
        **dict.fromkeys((f"{CONDITION}{each}" for each in conditions), Rows("prompt")),
        **OF_ROLLOUTS,
    }


def restore_draws(
    tensors: dict[str, Tensor], row: Int[Tensor, " rollout"], schedule: Schedule
) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
    """Returns a stored trajectory and its behavior log-probs.

    Args:
      row: Row of each rollout's conditions.

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
