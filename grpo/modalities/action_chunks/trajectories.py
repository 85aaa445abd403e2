"""Trajectories of action chunks, in memory and in storage."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.modalities.action_chunks.model import ChunkShape
from grpo.modalities.action_chunks.phases import NO_PHASE, Labeller
from grpo.modalities.action_chunks.simulation.base import Ending
from grpo.modalities.shared.packed import Rows, numbered, require_entries
from grpo.types import ActionChunks

ROUNDING = 1e-3  # nats; tolerance for log-probs above 0
LAYOUT = {
    "instruction_length": Rows("prompt", each="integer"),
    "instruction": Rows("prompt", "instruction_length", each="integer"),
    "steps": Rows("rollout", each="integer"),
    "ending": Rows("rollout", each="integer"),
    "observation": Rows("rollout", "steps"),
    "picture": Rows("rollout", "steps"),
    "action": Rows("rollout", "steps"),
    "executed": Rows("rollout", "steps", each="integer"),
    "behavior_logp": Rows("rollout", "steps", each="real"),
}


@dataclass(frozen=True, kw_only=True)
class ChunkTrajectory:
    """Instructions per prompt, and observations and actions per chunk.

    Row k of `observation`, `picture`, `action` and `executed` belongs to the k-th True entry of
    `mask` in row-major order.
    """

    group: Int[Tensor, " rollout"]  # row of `instruction`
    instruction: Int[Tensor, "prompt width"]  # tokens, padded on the right
    instruction_mask: Bool[Tensor, "prompt width"]
    mask: Bool[Tensor, "rollout step"]
    observation: Float[Tensor, "chunk number"]  # before the chunk
    picture: UInt8[Tensor, "chunk 3 pixel pixel"]  # before the chunk; 0 pixels without vision
    action: Int[Tensor, "chunk token"]  # bins, ordered by time, then dimension
    executed: Int[Tensor, " chunk"]  # number of executed actions
    ending: Int[Tensor, " rollout"]  # an Ending
    chunks: ActionChunks  # continuous actions and phases

    noise = None  # the steps are not Gaussian
    variant = None  # no prompt variants

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "ChunkTrajectory":
        """Returns some rollouts, truncated to `num_steps` chunks."""
        drawn = numbered(self.mask)[rows, :num_steps]
        drawn = drawn[drawn >= 0]
        return ChunkTrajectory(
            group=self.group[rows],
            instruction=self.instruction,
            instruction_mask=self.instruction_mask,
            mask=self.mask[rows, :num_steps],
            observation=self.observation[drawn],
            picture=self.picture[drawn],
            action=self.action[drawn],
            executed=self.executed[drawn],
            ending=self.ending[rows],
            chunks=self.chunks.select(rows, num_steps),
        )

    def pack(self, logp: Float[Tensor, "rollout step"]) -> dict[str, Tensor]:
        """Returns flat tensors that can be concatenated."""
        return {
            "instruction": self.instruction[self.instruction_mask],
            "instruction_length": self.instruction_mask.sum(dim=1),
            "steps": self.mask.sum(dim=1),
            "ending": self.ending,
            "observation": self.observation,
            "picture": self.picture,
            "action": self.action,
            "executed": self.executed,
            "behavior_logp": logp[self.mask],
        }


def describe_chunks(
    mask: Bool[Tensor, "rollout step"],
    action: Int[Tensor, "chunk token"],
    executed: Int[Tensor, " chunk"],
    *,
    shape: ChunkShape,
    label: Labeller,
) -> ActionChunks:
    """Returns each chunk's actions in [-1, 1], whether they were executed, and its phase.

    The last dimension of an action is the gripper's; positive values close it. Phases read all
    chosen actions, executed or not: the executed number would reveal how the rollout ended.
    """
    values = to_values(action, shape)
    gripper = values.unflatten(1, (shape.length, shape.actions))[:, :, -1]
    closed = (gripper > 0).sum(dim=1) / shape.length
    was_done = torch.arange(shape.tokens) // shape.actions < executed[:, None]
    spread = values.new_zeros(*mask.shape, shape.tokens)
    spread[mask] = torch.where(was_done, values, 0.0)
    is_executed = torch.zeros(spread.shape, dtype=torch.bool)
    is_executed[mask] = was_done
    phase = label(values.new_zeros(mask.shape).masked_scatter(mask, closed))
    return ActionChunks(
        phase=torch.where(mask, phase, NO_PHASE), action=spread, is_executed=is_executed
    )


def to_values(
    action: Int[Tensor, "chunk token"], shape: ChunkShape
) -> Float[Tensor, "chunk token"]:
    """Returns the center of each bin, from -1 for the first to 1 for the last."""
    return action / (shape.bins - 1) * 2 - 1


def restore_chunks(
    tensors: dict[str, Tensor],
    row: Int[Tensor, " rollout"],
    *,
    shape: ChunkShape,
    label: Labeller,
) -> tuple[ChunkTrajectory, Float[Tensor, "rollout step"]]:
    """Returns a stored trajectory and its behavior log-probs.

    Args:
      row: Row of each rollout's instruction.

    Raises:
      ArtifactError: If the policy cannot have stored such chunks or endings.
    """
    _require_chunks(tensors, shape)
    steps, length = tensors["steps"], tensors["instruction_length"]
    mask = torch.arange(max(int(steps.max()), 1)) < steps[:, None]
    instruction_mask = torch.arange(int(length.max())) < length[:, None]
    instruction = torch.zeros(instruction_mask.shape, dtype=torch.long)
    instruction[instruction_mask] = tensors["instruction"]
    trajectory = ChunkTrajectory(
        group=row,
        instruction=instruction,
        instruction_mask=instruction_mask,
        mask=mask,
        observation=tensors["observation"],
        picture=tensors["picture"],
        action=tensors["action"],
        executed=tensors["executed"],
        ending=tensors["ending"],
        chunks=describe_chunks(
            mask, tensors["action"], tensors["executed"], shape=shape, label=label
        ),
    )
    return trajectory, torch.zeros(mask.shape).masked_scatter(mask, tensors["behavior_logp"])


def _require_chunks(tensors: dict[str, Tensor], shape: ChunkShape) -> None:
    """Raises ArtifactError unless the policy can have stored these chunks and endings."""
    observation, action, executed = (
        tensors[each] for each in ("observation", "action", "executed")
    )
    wrong = {
        f"observation must have {shape.observations} columns": (
            observation.shape[1:] != (shape.observations,)
        ),
        "observation must be finite": not bool(observation.isfinite().all()),
        f"picture must have {shape.pixels} pixels to a side": (
            tensors["picture"].shape[1:] != (3, shape.pixels, shape.pixels)
        ),
        f"action must have {shape.tokens} columns": action.shape[1:] != (shape.tokens,),
        f"action must be in [0, {shape.bins})": bool(((action < 0) | (action >= shape.bins)).any()),
        f"executed must be in [1, {shape.length}]": bool(
            ((executed < 1) | (executed > shape.length)).any()
        ),
        "ending must be an Ending": bool((tensors["ending"] >= len(Ending)).any()),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ArtifactError(f"{what}; rerun the stage rollout")
    logp = tensors["behavior_logp"]
    require_entries(tensors, "behavior_logp", logp <= ROUNDING, "a log-prob, at most 0")
