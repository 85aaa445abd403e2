"""Policies whose step is a chunk of a robot's actions, executed in a simulator."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Generator, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoTokenizer

from grpo.modalities.action_chunks.modality import ActionChunkPolicyParams, ChunkDecoding
from grpo.modalities.action_chunks.model import (
    ActionChunkModel,
    ChunkShape,
    encode_instructions,
    load_action_model,
)
from grpo.modalities.action_chunks.phases import Labeller, choose_labeller
from grpo.modalities.action_chunks.simulation.base import SEPARATOR, Ending, Moment
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool, Order
from grpo.modalities.action_chunks.trajectories import (
    LAYOUT,
    ChunkTrajectory,
    describe_chunks,
    restore_chunks,
    to_values,
)
from grpo.modalities.modality import RunParams
from grpo.modalities.policy import Policy
from grpo.modalities.shared.flops import count_pass
from grpo.modalities.shared.logits import draw, entropy_of
from grpo.modalities.shared.packed import Layout, numbered
from grpo.modalities.shared.restoring import restore_round
from grpo.runtime.machine import DTYPES
from grpo.types import Cost, StepLogProbs

ENDED = {
    Ending.STEP_LIMIT: "no success in {} steps",
    Ending.SUCCESS: "success after {} steps",
    Ending.FAILED: "the environment failed",
    Ending.TIMED_OUT: "the environment timed out",
}
CRASHED = (Ending.FAILED, Ending.TIMED_OUT)
SIMULATOR = "grpo.modalities.action_chunks.simulation.metaworld:MetaWorld"


@runtime_checkable
class Scenes(Protocol):
    """Slots that run scenes in parallel: `EnvironmentPool` in simulation/pool.py."""

    seconds: float  # total time spent in `play`

    def play(self, orders: dict[int, Order]) -> dict[int, Moment]: ...


class ActionChunkPolicy(Policy[ChunkTrajectory]):
    """An action-chunk model with its decoding settings and its simulator."""

    def __init__(
        self,
        model: ActionChunkModel,
        tokenizer: Any,
        *,
        decoding: ChunkDecoding,
        scenes: Scenes,
        slots: int,
        label: Labeller,
    ) -> None:
        """Args:
        slots: Number of parallel scenes, which share one forward pass.
        label: Labels the phase of every chunk.
        """
        self._model = model
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.scenes = scenes
        self.slots = slots
        self.label = label
        self.cost = Cost()
        self._flops: dict[tuple[int, bool], int] = {}

    @property
    def model(self) -> ActionChunkModel:
        """The backbone with its projections."""
        return self._model

    @torch.no_grad()
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[ChunkTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and log-probs in nats, summed over the tokens of executed actions.

        A prompt is a scene as text; the part before " | " is the policy's instruction. Scenes run
        in slots: when a scene ends, the next rollout takes its slot. So the composition of a
        forward pass depends on the lengths of earlier rollouts, not on timing. Rollouts whose
        environment fails have no steps.
        """
        group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(group_sizes))
        instructions = [each.partition(SEPARATOR)[0] for each in prompts]
        instruction, instruction_mask = encode_instructions(self.tokenizer, instructions)
        record = _Record(len(group), self.decoding.max_steps, self._model.shape)
        uniform = torch.rand(*record.action.shape, generator=generator)
        for playing, moments in self._play([prompts[row] for row in group.tolist()], record):
            rows = torch.tensor(playing)
            prompt = group[rows]
            seen = _stack_observations(moments, self._model.shape)
            logits = self._forward(instruction[prompt], instruction_mask[prompt], *seen)
            chosen, logp = self._draw(logits, uniform[rows, record.steps[rows]])
            record.decide(rows, *seen, chosen, logp)
        self.cost += Cost(sampled_steps=int(record.steps.sum()))
        self.simulation_seconds = self.scenes.seconds
        trajectory = self._trajectory(group, instruction, instruction_mask, record)
        mask = trajectory.mask
        logp = sum_executed(record.logp[mask], trajectory.executed, record.shape)
        return trajectory, torch.zeros(mask.shape).masked_scatter(mask, logp)

    def _trajectory(
        self, group: Tensor, instruction: Tensor, instruction_mask: Tensor, record: "_Record"
    ) -> ChunkTrajectory:
        """Returns the record of a batch of rollouts as a trajectory."""
        mask = record.mask
        action, executed = record.action[mask], record.executed[mask]
        return ChunkTrajectory(
            group=group,
            instruction=instruction,
            instruction_mask=instruction_mask,
            mask=mask,
            observation=record.observation[mask],
            picture=record.picture[mask],
            action=action,
            executed=executed,
            ending=record.ending,
            chunks=describe_chunks(mask, action, executed, shape=record.shape, label=self.label),
        )

    def _play(
        self, scenes: list[str], record: "_Record"
    ) -> Iterator[tuple[list[int], list[Moment]]]:
        """Yields rollouts that need a decision with their observations.

        The caller writes the decisions to `record`. A free slot starts the next scene while the
        other slots act.
        """
        waiting = iter(range(len(scenes)))
        playing: dict[int, int] = {}  # slot -> rollout
        while True:
            orders: dict[int, Order] = {
                slot: record.last_actions(row) for slot, row in playing.items()
            }
            for slot in range(min(self.slots, len(scenes))):
                if slot not in playing and (row := next(waiting, None)) is not None:
                    playing[slot], orders[slot] = row, scenes[row]
            if not orders:
                return
            moments = self.scenes.play(dict(sorted(orders.items())))
            for slot, moment in moments.items():
                if record.note(playing[slot], moment):
                    del playing[slot]
            if playing:
                slots = sorted(playing)
                yield [playing[slot] for slot in slots], [moments[slot] for slot in slots]

    def step_log_probs(
        self,
        trajectory: ChunkTrajectory,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns log-probs in nats of the needed chunks, 0 elsewhere; forwards only those.

        The tokens of a chunk are independent, so that its entropy is the sum of theirs.
        """
        chosen = trajectory.mask if needed is None else needed.cpu() & trajectory.mask
        rows, steps = chosen.nonzero(as_tuple=True)
        logp = torch.zeros(chosen.shape)
        if len(rows) == 0:
            return StepLogProbs(logp=logp, entropy=logp if with_entropy else None)
        drawn = numbered(trajectory.mask)[rows, steps]
        prompt = trajectory.group[rows]
        logits = self._forward(
            trajectory.instruction[prompt],
            trajectory.instruction_mask[prompt],
            trajectory.observation[drawn],
            trajectory.picture[drawn],
        )
        every = (logits / self.decoding.temperature).log_softmax(dim=-1)
        by_token = every.gather(2, trajectory.action[drawn][..., None])[..., 0]
        executed, shape = trajectory.executed[drawn], self._model.shape
        summed = sum_executed(by_token, executed, shape)
        entropy = None
        if with_entropy:
            of_chunk = sum_executed(entropy_of(every), executed, shape)
            entropy = logp.masked_scatter(chosen, of_chunk)
        return StepLogProbs(logp=logp.masked_scatter(chosen, summed), entropy=entropy)

    def decode(self, trajectory: ChunkTrajectory) -> list[str]:
        """Returns each rollout's ending; without a failure, also its number of simulator steps."""
        steps = torch.zeros(trajectory.mask.shape, dtype=torch.long)
        steps = steps.masked_scatter(trajectory.mask, trajectory.executed).sum(dim=1)
        return [
            ENDED[Ending(ending)].format(count)
            for ending, count in zip(trajectory.ending.tolist(), steps.tolist(), strict=True)
        ]

    def is_finished(self, trajectory: ChunkTrajectory) -> Bool[Tensor, " rollout"]:
        """Returns which rollouts ended before the step limit."""
        return trajectory.ending != Ending.STEP_LIMIT

    def widths(
        self,
        trajectory: ChunkTrajectory,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns the length of the backbone's sequence times the number of needed chunks."""
        extra = 1 + self._model.patches + self._model.shape.positions
        positions = trajectory.instruction.shape[1] + extra
        widths: Tensor = needed.sum(dim=1) * positions
        return widths

    @property
    def layout(self) -> Layout:
        """The layout of stored rollouts."""
        return LAYOUT

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[ChunkTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs; see `restore_chunks`."""
        return restore_chunks(tensors, row, shape=self._model.shape, label=self.label)

    def _draw(
        self, logits: Float[Tensor, "row token bin"], uniform: Float[Tensor, "row token"]
    ) -> tuple[Int[Tensor, "row token"], Float[Tensor, "row token"]]:
        """Returns a bin per token and its log-prob, which is 0 for greedy decoding."""
        if self.decoding.temperature == 0:
            chosen = logits.argmax(dim=-1)
            return chosen, torch.zeros(chosen.shape)
        chosen, logp = draw(logits.flatten(0, 1), uniform.flatten(), self.decoding.temperature)
        return chosen.view(uniform.shape), logp.view(uniform.shape)

    def _forward(self, *inputs: Tensor) -> Tensor:
        """Returns logits on the host in float32 and adds the pass to the cost.

        Args:
          inputs: The model's inputs, the instruction first.
        """
        device = self._model.queries.device
        logits: Tensor = self._model(*(each.to(device) for each in inputs)).float().cpu()
        (rows, width), is_training = inputs[0].shape, torch.is_grad_enabled()
        self.cost += Cost(flops=rows * self._count_flops(width, is_training))
        return logits

    def _count_flops(self, width: int, is_training: bool) -> int:
        """Returns the FLOPs of one row by torch's counter; the total is linear in rows."""
        known = self._flops.get((width, is_training))
        if known is not None:
            return known
        device = self._model.queries.device
        words = torch.zeros(1, width, dtype=torch.long, device=device)
        shape = self._model.shape
        state = torch.zeros(1, shape.observations, device=device)
        blank = torch.zeros(1, 3, shape.pixels, shape.pixels, dtype=torch.uint8, device=device)
        parameters = list(self._model.parameters())
        # Own hooks, so that a caller's `saved_bytes` does not count this pass.
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            count = count_pass(
                lambda: self._model(words, words == 0, state, blank).float(),
                parameters,
                is_training,
            )
        self._flops[width, is_training] = count
        return count


def sum_executed(
    by_token: Float[Tensor, "chunk token"], executed: Int[Tensor, " chunk"], shape: ChunkShape
) -> Float[Tensor, " chunk"]:
    """Returns the sum over the tokens of executed actions, accumulated in float64."""
    by_time = by_token.unflatten(1, (shape.length, shape.actions)).double().sum(dim=2)
    was_done = torch.arange(shape.length) < executed[:, None]
    total: Tensor = (by_time * was_done).sum(dim=1).to(by_token.dtype)
    return total


def _stack_observations(
    moments: Sequence[Moment], shape: ChunkShape
) -> tuple[Float[Tensor, "row number"], UInt8[Tensor, "row 3 pixel pixel"]]:
    """Returns the policy's inputs for some moments: truncated states and pictures."""
    numbers = np.stack([each.observation[: shape.observations] for each in moments])
    return torch.from_numpy(numbers), torch.from_numpy(np.stack([each.picture for each in moments]))


class _Record:
    """Observations and actions of a batch of rollouts so far."""

    def __init__(self, rollouts: int, max_steps: int, shape: ChunkShape) -> None:
        self.shape = shape
        self.steps = torch.zeros(rollouts, dtype=torch.long)  # chunks decided
        self.observation = torch.zeros(rollouts, max_steps, shape.observations)
        pixels = (3, shape.pixels, shape.pixels)
        self.picture = torch.zeros(rollouts, max_steps, *pixels, dtype=torch.uint8)
        self.action = torch.zeros(rollouts, max_steps, shape.tokens, dtype=torch.long)
        self.logp = torch.zeros(rollouts, max_steps, shape.tokens)
        self.executed = torch.zeros(rollouts, max_steps, dtype=torch.long)
        self.ending = torch.full((rollouts,), int(Ending.STEP_LIMIT))

    @property
    def mask(self) -> Bool[Tensor, "rollout step"]:
        """The valid chunks: those of rollouts whose environment did not fail."""
        is_whole = ~torch.isin(self.ending, torch.tensor(CRASHED))
        return (torch.arange(self.executed.shape[1]) < self.steps[:, None]) & is_whole[:, None]

    def decide(
        self, rows: Tensor, observation: Tensor, picture: Tensor, chosen: Tensor, logp: Tensor
    ) -> None:
        """Records the observations of some rollouts and the chunks that they chose."""
        step = self.steps[rows]
        self.observation[rows, step] = observation
        self.picture[rows, step] = picture
        self.action[rows, step] = chosen
        self.logp[rows, step] = logp
        self.steps[rows] += 1

    def last_actions(self, row: int) -> list[list[float]]:
        """Returns the actions of a rollout's last chunk, ordered by time."""
        step = int(self.steps[row]) - 1
        values = to_values(self.action[row, step][None], self.shape)[0]
        actions: list[list[float]] = values.view(self.shape.length, self.shape.actions).tolist()
        return actions

    def note(self, row: int, moment: Moment) -> bool:
        """Records an environment's answer; returns whether the rollout has ended."""
        step = int(self.steps[row]) - 1
        if moment.executed:
            self.executed[row, step] = moment.executed
        if moment.ending is not None:
            self.ending[row] = moment.ending
            return True
        return step + 1 == self.executed.shape[1]


def load_chunk_policy(
    params: RunParams[ActionChunkPolicyParams],
    *,
    base: Path,
    directory: Path,
    decoding: ChunkDecoding,
    policies_per_host: int = 1,
) -> ActionChunkPolicy:
    """Returns the policy of a directory on the machine's device, without dropout.

    Args:
      base: The base policy's directory. A different `directory` holds the trained weights.
      policies_per_host: Number of policies that share this host's cores for simulation.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model = load_action_model(base, dtype)
    restore_round(params, model, base=base, directory=directory, adapted=model.backbone)
    nn.Module.to(model, params.machine.device)
    return ActionChunkPolicy(
        model,
        AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False),
        decoding=decoding,
        scenes=EnvironmentPool(
            SIMULATOR,
            processes=min(max(1, _available_cores() // policies_per_host), settings.scenes.at_once),
            timeout_seconds=settings.scenes.timeout_seconds,
            settings={"pixels": model.shape.pixels},
        ),
        slots=settings.scenes.at_once,
        label=choose_labeller(settings.phases, settings.max_steps),
    )


def _available_cores() -> int:
    """Returns the number of cores available to this process; macOS reports only the total."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
