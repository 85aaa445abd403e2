"""What a policy did in a simulator in a batch of rollouts, in memory and as it is stored."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo.errors import ArtifactError
from grpo.policies.action_model import ChunkShape
from grpo.policies.groups import order_of_appearance
from grpo.policies.phases import Labeller
from grpo.policies.steps import numbered
from grpo.simulation.base import Ending
from grpo.types import ActionChunks

BY_PROMPT = ("instruction_length",)
BY_ROLLOUT = ("steps", "ending")
BY_CHUNK = ("observation", "action", "executed", "behavior_logp")


@dataclass(frozen=True, kw_only=True)
class ChunkTrajectory:
    """Instructions by prompt, and what was seen and done at every chunk.

    `observation`, `action` and `executed` hold chunks rollout by rollout: the k-th True of `mask`,
    row by row, is their row k.
    """

    group: Int[Tensor, " rollout"]  # row of `instruction`
    instruction: Int[Tensor, "prompt width"]  # tokens, padded on the right
    instruction_mask: Bool[Tensor, "prompt width"]
    mask: Bool[Tensor, "rollout step"]
    observation: Float[Tensor, "chunk number"]  # before the chunk
    action: Int[Tensor, "chunk token"]  # bins: time first, then dimension
    executed: Int[Tensor, " chunk"]  # actions in time that were carried out
    ending: Int[Tensor, " rollout"]  # an Ending
    chunks: ActionChunks  # what was carried out, and the phase

    @property
    def noise(self) -> None:
        """None: a chunk's distribution is no Gaussian."""
        return None

    @property
    def variant(self) -> None:
        """None: prompts are drawn from as they are."""
        return None

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "ChunkTrajectory":
        """Returns some rollouts, cut after `num_steps` chunks."""
        drawn = numbered(self.mask)[rows, :num_steps]
        drawn = drawn[drawn >= 0]
        chunks = self.chunks.select(rows)
        return ChunkTrajectory(
            group=self.group[rows],
            instruction=self.instruction,
            instruction_mask=self.instruction_mask,
            mask=self.mask[rows, :num_steps],
            observation=self.observation[drawn],
            action=self.action[drawn],
            executed=self.executed[drawn],
            ending=self.ending[rows],
            chunks=ActionChunks(chunks.phase[:, :num_steps], chunks.action[:, :num_steps]),
        )


def describe_chunks(
    mask: Bool[Tensor, "rollout step"],
    action: Int[Tensor, "chunk token"],
    executed: Int[Tensor, " chunk"],
    *,
    shape: ChunkShape,
    label: Labeller,
) -> ActionChunks:
    """Returns the actions of every chunk, in [-1, 1], 0 where not carried out, and its phase.

    The last dimension of an action is the gripper's: it closes where that is positive.
    """
    values = to_values(action, shape).unflatten(1, (shape.length, shape.actions))
    was_done = torch.arange(shape.length) < executed[:, None]
    values = values * was_done[:, :, None]
    closed = (values[:, :, -1] > 0).sum(dim=1) / executed
    spread = values.new_zeros(*mask.shape, shape.tokens)
    spread[mask] = values.flatten(1)
    fractions = values.new_zeros(mask.shape).masked_scatter(mask, closed)
    return ActionChunks(phase=label(fractions, mask), action=spread)


def to_values(
    action: Int[Tensor, "chunk token"], shape: ChunkShape
) -> Float[Tensor, "chunk token"]:
    """Returns the middle of each bin: -1 of the first to 1 of the last."""
    return action / (shape.bins - 1) * 2 - 1


def pack_trajectory(
    trajectory: ChunkTrajectory, logp: Float[Tensor, "rollout step"]
) -> dict[str, Tensor]:
    """Returns a trajectory as flat tensors, which can be concatenated."""
    return {
        "instruction": trajectory.instruction[trajectory.instruction_mask],
        "instruction_length": trajectory.instruction_mask.sum(dim=1),
        "steps": trajectory.mask.sum(dim=1),
        "ending": trajectory.ending,
        "observation": trajectory.observation,
        "action": trajectory.action,
        "executed": trajectory.executed,
        "behavior_logp": logp[trajectory.mask],
    }


def repack_trajectory(
    tensors: dict[str, Tensor], group: Int[Tensor, " rollout"], kept: Bool[Tensor, " rollout"]
) -> dict[str, Tensor]:
    """Returns what `pack_trajectory` stored of some rollouts.

    Raises:
      ArtifactError: If the tensors do not fit one another or `group`.
    """
    row = _prompt_rows(tensors, group)
    prompts = torch.zeros(int(row.max()) + 1, dtype=torch.bool)
    prompts[row[kept]] = True
    chosen = {
        "instruction": prompts.repeat_interleave(tensors["instruction_length"]),
        **dict.fromkeys(BY_PROMPT, prompts),
        **dict.fromkeys(BY_ROLLOUT, kept),
        **dict.fromkeys(BY_CHUNK, kept.repeat_interleave(tensors["steps"])),
    }
    return {name: each[chosen[name]] for name, each in tensors.items()}


def unpack_trajectory(
    tensors: dict[str, Tensor],
    group: Int[Tensor, " rollout"],
    *,
    shape: ChunkShape,
    label: Labeller,
) -> tuple[ChunkTrajectory, Float[Tensor, "rollout step"]]:
    """Returns a stored trajectory and its behavior log-probs.

    Raises:
      ArtifactError: If tensors are missing, or do not fit one another, `group` or the policy.
    """
    row = _prompt_rows(tensors, group)
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
        action=tensors["action"],
        executed=tensors["executed"],
        ending=tensors["ending"],
        chunks=describe_chunks(
            mask, tensors["action"], tensors["executed"], shape=shape, label=label
        ),
    )
    return trajectory, torch.zeros(mask.shape).masked_scatter(mask, tensors["behavior_logp"])


def _prompt_rows(
    tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
) -> Int[Tensor, " rollout"]:
    """Returns the row of each rollout's instruction, of tensors that were stored."""
    row = order_of_appearance(group)
    expected = {"instruction", *BY_PROMPT, *BY_ROLLOUT, *BY_CHUNK}
    if set(tensors) != expected:
        raise ArtifactError(f"must hold {sorted(expected)}, got {sorted(tensors)}")
    wanted = {
        "instruction": int(tensors["instruction_length"].sum()),
        **dict.fromkeys(BY_PROMPT, int(row.max()) + 1),
        **dict.fromkeys(BY_ROLLOUT, len(row)),
        **dict.fromkeys(BY_CHUNK, int(tensors["steps"].sum())),
    }
    for name, count in wanted.items():
        if len(tensors[name]) != count:
            raise ArtifactError(f"{name} must have {count} entries, got {len(tensors[name])}")
    return row


def _require_chunks(tensors: dict[str, Tensor], shape: ChunkShape) -> None:
    """Raises ArtifactError unless chunks and endings are what the policy can have stored."""
    observation, action, executed = (tensors[each] for each in BY_CHUNK[:3])
    wrong = {
        f"observation must have {shape.observations} columns": (
            observation.shape[1:] != (shape.observations,)
        ),
        "observation must be finite": not bool(observation.isfinite().all()),
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
