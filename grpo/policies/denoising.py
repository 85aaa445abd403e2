"""Policies whose step is a denoising step: flow-matching models of `diffusers`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grpo.errors import ArtifactError
from grpo.policies.flops import left_out_by_torch
from grpo.policies.groups import order_of_appearance
from grpo.policies.kernels import (
    MATCHED,
    Denoising,
    Schedule,
    apply_kernel,
    make_schedule,
    match_velocity,
    step_log_prob,
)
from grpo.policies.pipelines import (
    condition_names,
    encode_captions,
    latent_shape,
    sigmas_of,
    to_pixels,
)
from grpo.policies.steps import numbered, read_mask, require_equal_steps
from grpo.policy_params import Canvas
from grpo.types import Cost, Scores, StepNoise

CONDITION = "condition."  # before the names of stored conditions
BY_ROLLOUT = ("steps", "media")
BY_DRAW = ("step_index", "before", "after", "behavior_logp")


@dataclass(frozen=True, kw_only=True)
class DenoisingTrajectory:
    """What was drawn at the steps that have noise; the others are functions of these.

    `before` and `after` hold their states, rollout by rollout: the k-th True of `mask`, row by row,
    is their row k.
    """

    group: Int[Tensor, " rollout"]  # row of `conditions`
    conditions: Mapping[str, Float[Tensor, "prompt ..."]]
    mask: Bool[Tensor, "rollout step"]
    before: Float[Tensor, " drawn *sample"]
    after: Float[Tensor, " drawn *sample"]
    noise: StepNoise  # at the steps of `mask`
    media: UInt8[Tensor, " rollout *pixels"]

    def select(self, rows: Int[Tensor, " kept"], num_steps: int) -> "DenoisingTrajectory":
        """Returns some rollouts, cut after `num_steps` steps."""
        drawn = numbered(self.mask)[rows, :num_steps]
        drawn = drawn[drawn >= 0]
        return DenoisingTrajectory(
            group=self.group[rows],
            conditions=self.conditions,
            mask=self.mask[rows, :num_steps],
            before=self.before[drawn],
            after=self.after[drawn],
            noise=self.noise.select(rows, num_steps),
            media=self.media[rows],
        )


class DenoisingPolicy:
    """The transformer of a pipeline and how it draws; all else of the pipeline stays as it is."""

    def __init__(
        self, pipeline: Any, *, decoding: Denoising, canvas: Canvas, num_tokens: int
    ) -> None:
        """Takes a pipeline as `grpo.policies.pipelines.load_pipeline` returns it.

        Args:
          num_tokens: Of a caption in the T5 encoder.
        """
        self.pipeline = pipeline
        self.decoding = decoding
        self.canvas = canvas
        self.num_tokens = num_tokens
        self.cost = Cost()

    @property
    def model(self) -> nn.Module:
        """The transformer, or its wrapper with adapters."""
        transformer: nn.Module = self.pipeline.transformer
        return transformer

    def schedule(self) -> Schedule:
        """Returns the times of all steps, and every step without noise and with it."""
        return make_schedule(sigmas_of(self.pipeline, self.decoding.num_steps), self.decoding)

    @torch.no_grad()
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts, and log-probs in nats of the steps with noise, 0 elsewhere.

        The rollouts of a prompt have noise at the same steps (rule U4) and start from noise of
        their own. With the density "matched" no step has noise: the steps chosen are those at which
        the image is noised again and the model's velocity compared with the noise that was added.
        """
        schedule = self.schedule()
        conditions = {name: each.cpu() for name, each in self._encode(prompts).items()}
        group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(group_sizes))
        mask = self._choose_steps(len(prompts), generator)[group]
        shape = latent_shape(self.pipeline, self.canvas)
        state = torch.randn(len(group), *shape, generator=generator)
        is_matched = self.decoding.density == MATCHED
        noisy, index = mask & (not is_matched), numbered(mask)
        before = torch.empty(int(mask.sum()), *shape)
        after = torch.empty_like(before)
        logp = torch.zeros(mask.shape)
        for step in range(self.decoding.num_steps):
            rows = noisy[:, step].nonzero()[:, 0]
            kernels = [
                (schedule.noisy if drawn else schedule.exact)[step]
                for drawn in noisy[:, step].tolist()
            ]
            time = schedule.time[step].expand(len(group))
            velocity = self._velocity(state, time, group, conditions)
            mean, std = apply_kernel(kernels, state, velocity)
            if len(rows):
                before[index[rows, step]] = state[rows]
                noise = torch.randn(len(rows), *shape, generator=generator)
                drawn = mean[rows] + std[rows].view(-1, *[1] * len(shape)) * noise
                logp[rows, step] = step_log_prob(drawn, mean[rows], std[rows])
                mean[rows] = after[index[rows, step]] = drawn
            state = mean
        if is_matched:
            before, after = match_velocity(state, mask, schedule, generator)
        self.cost += Cost(sampled_steps=mask.numel())
        trajectory = DenoisingTrajectory(
            group=group,
            conditions=conditions,
            mask=mask,
            before=before,
            after=after,
            noise=schedule.noise_at(mask),
            media=to_pixels(self.pipeline, state.to(self._device)),
        )
        return trajectory, self.log_prob(trajectory) if is_matched else logp

    def replayed(self, trajectory: DenoisingTrajectory) -> DenoisingTrajectory:
        """Returns the trajectory: scoring repeats nothing of its sampling but what is in it."""
        return trajectory

    def log_prob(
        self, trajectory: DenoisingTrajectory, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Float[Tensor, "rollout step"]:
        """Returns the log-probs of `score`."""
        return self.score(trajectory, needed).logp

    def score(
        self, trajectory: DenoisingTrajectory, needed: Bool[Tensor, "rollout step"] | None = None
    ) -> Scores:
        """Returns log-probs in nats of the needed steps, summed over dimensions, 0 elsewhere.

        And their means. Only the needed steps are computed.

        Raises:
          ValueError: If a needed step has no noise and so no density (rule U7).
        """
        chosen = trajectory.mask if needed is None else needed.cpu()
        if (chosen & ~trajectory.mask).any():
            raise ValueError("U7: log_prob needs steps with noise: without it there is no density")
        rows, steps = chosen.nonzero(as_tuple=True)
        if len(rows) == 0:
            return Scores(logp=torch.zeros(chosen.shape), mean=trajectory.before[:0])
        drawn = numbered(trajectory.mask)[rows, steps]
        before = trajectory.before[drawn]
        schedule = self.schedule()
        velocity = self._velocity(
            before, schedule.time[steps], trajectory.group[rows], trajectory.conditions
        )
        kernels = [schedule.noisy[step] for step in steps.tolist()]
        mean, std = apply_kernel(kernels, before, velocity)
        logp = step_log_prob(trajectory.after[drawn], mean, std)
        return Scores(
            logp=torch.zeros(chosen.shape).masked_scatter(chosen, logp),
            mean=mean / std.view(-1, *[1] * (mean.dim() - 1)),
        )

    def decode(self, trajectory: DenoisingTrajectory) -> list[str]:
        """Returns no text: a judge looks at `media`."""
        return [""] * len(trajectory.group)

    def is_finished(self, trajectory: DenoisingTrajectory) -> Bool[Tensor, " rollout"]:
        """Returns True for all: the number of steps is fixed."""
        return torch.ones(len(trajectory.group), dtype=torch.bool)

    def widths(self, trajectory: DenoisingTrajectory) -> Int[Tensor, " rollout"]:
        """Returns the positions of the transformer's sequence times the steps with noise."""
        _, height, width = latent_shape(self.pipeline, self.canvas)
        patch: int = self.pipeline.transformer.config.patch_size
        positions: Tensor = trajectory.mask.sum(dim=1) * (height // patch) * (width // patch)
        return positions

    def pack(
        self, trajectory: DenoisingTrajectory, logp: Float[Tensor, "rollout step"]
    ) -> dict[str, Tensor]:
        """Returns a trajectory as flat tensors, which can be concatenated."""
        stored = {f"{CONDITION}{name}": each for name, each in trajectory.conditions.items()}
        return {
            **stored,
            "steps": trajectory.mask.sum(dim=1),
            "step_index": trajectory.mask.nonzero()[:, 1],
            "before": trajectory.before,
            "after": trajectory.after,
            "behavior_logp": logp[trajectory.mask],
            "media": trajectory.media,
        }

    def repack(
        self,
        tensors: dict[str, Tensor],
        group: Int[Tensor, " rollout"],
        kept: Bool[Tensor, " rollout"],
    ) -> dict[str, Tensor]:
        """Returns what `pack` stored of some rollouts.

        Raises:
          ArtifactError: If the tensors do not fit one another or `group`.
        """
        row = order_of_appearance(group)
        self._require_stored(tensors, row)
        prompts = torch.zeros(int(row.max()) + 1, dtype=torch.bool)
        prompts[row[kept]] = True
        drawn = kept.repeat_interleave(tensors["steps"])
        by_rollout = {"steps", "media"}
        return {
            name: each[
                prompts if name.startswith(CONDITION) else kept if name in by_rollout else drawn
            ]
            for name, each in tensors.items()
        }

    def unpack(
        self, tensors: dict[str, Tensor], group: Int[Tensor, " rollout"]
    ) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Raises:
          ArtifactError: If tensors are missing or do not fit one another or `group`, or a group has
            noise at different steps (rule U4).
        """
        row = order_of_appearance(group)
        self._require_stored(tensors, row)
        schedule = self.schedule()
        mask = read_mask(tensors, num_steps=len(schedule.time))
        require_equal_steps(mask, row)
        trajectory = DenoisingTrajectory(
            group=row,
            conditions={
                name.removeprefix(CONDITION): each
                for name, each in tensors.items()
                if name.startswith(CONDITION)
            },
            mask=mask,
            before=tensors["before"],
            after=tensors["after"],
            noise=schedule.noise_at(mask),
            media=tensors["media"],
        )
        logp = torch.zeros(mask.shape).masked_scatter(mask, tensors["behavior_logp"])
        return trajectory, logp

    def _require_stored(self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]) -> None:
        """Raises ArtifactError unless the tensors are those of `pack` and fit their table."""
        conditions = [f"{CONDITION}{name}" for name in condition_names(self.pipeline)]
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

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def _encode(self, captions: list[str]) -> dict[str, Tensor]:
        return encode_captions(self.pipeline, captions, self.num_tokens)

    @cached_property
    def _blank(self) -> dict[str, Tensor]:
        """The condition of no caption, which guidance leads away from."""
        return self._encode([""])

    def _choose_steps(self, num_prompts: int, generator: Generator) -> Bool[Tensor, "prompt step"]:
        """Returns at which steps the rollouts of each prompt have noise; never at the last."""
        mask = torch.zeros(num_prompts, self.decoding.num_steps, dtype=torch.bool)
        first, end = self.decoding.window
        end = min(end, self.decoding.num_steps - 1)
        if self.decoding.stochastic == "all":
            mask[:, first:end] = True
        elif self.decoding.stochastic == "one_per_prompt":
            step = torch.randint(first, end, (num_prompts,), generator=generator)
            mask[torch.arange(num_prompts), step] = True
        return mask

    def _velocity(
        self,
        state: Float[Tensor, " row *sample"],
        time: Float[Tensor, " row"],
        prompts: Int[Tensor, " row"],
        conditions: Mapping[str, Tensor],
    ) -> Float[Tensor, " row *sample"]:
        """Returns the guided velocity, on the host, in float32."""
        given = {name: each[prompts] for name, each in conditions.items()}
        velocity = self._forward(state, time, given)
        if self.decoding.guidance != 1:
            blank = {
                name: each.cpu().expand(len(state), *each.shape[1:])
                for name, each in self._blank.items()
            }
            free = self._forward(state, time, blank)
            velocity = free + self.decoding.guidance * (velocity - free)
        return velocity

    def _forward(
        self, state: Tensor, time: Float[Tensor, " row"], conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the transformer's output, and counts it."""
        output = self._run(state, time, conditions)
        per_row = self._training_flops if torch.is_grad_enabled() else self._forward_flops
        self.cost += Cost(flops=len(state) * per_row)
        result: Tensor = output.float().cpu()
        return result

    def _run(
        self, state: Tensor, time: Float[Tensor, " row"], conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the transformer's output, on its device and in its precision."""
        dtype = next(self.model.parameters()).dtype
        output: Tensor = self.model(
            hidden_states=state.to(self._device, dtype),
            timestep=time.to(self._device),
            return_dict=False,
            **{name: each.to(self._device, dtype) for name, each in conditions.items()},
        )[0]
        return output

    @cached_property
    def _forward_flops(self) -> int:
        return self._count_flops(backward=False)

    @cached_property
    def _training_flops(self) -> int:
        return self._count_flops(backward=True)

    def _count_flops(self, *, backward: bool) -> int:
        """Returns torch's count for one row, exact for every number of rows."""
        state = torch.zeros(1, *latent_shape(self.pipeline, self.canvas))
        counter = FlopCounterMode(display=False, custom_mapping=left_out_by_torch())
        with counter, torch.set_grad_enabled(backward):
            output = self._run(state, torch.zeros(1), self._blank)
            if backward:
                parameters = [each for each in self.model.parameters() if each.requires_grad]
                torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)
        return int(counter.get_total_flops())
