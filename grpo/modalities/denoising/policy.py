"""Policies whose step is a denoising step: flow-matching models of `diffusers`."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from grpo.errors import ArtifactError
from grpo.modalities.denoising.adascope import Pilots, find_windows
from grpo.modalities.denoising.modality import Canvas, DenoisingPolicyParams, Scope
from grpo.modalities.denoising.pipelines import (
    condition_names,
    encode_captions,
    find_unsupported_component,
    find_unsupported_setting,
    latent_shape,
    load_pipeline,
    num_positions,
    read_index,
    require_canvas,
    sigmas_of,
    to_pixels,
)
from grpo.modalities.denoising.sde_steps import (
    MATCHED,
    TIME,
    Denoising,
    Schedule,
    apply_kernel,
    make_schedule,
    match_velocity,
    step_log_prob,
)
from grpo.modalities.denoising.trajectories import DenoisingTrajectory, layout_of, restore_draws
from grpo.modalities.denoising.variants import blend, find_variants, variant_weight
from grpo.modalities.modality import Judgement, RunParams
from grpo.modalities.policy import Policy
from grpo.modalities.shared.flops import count_pass
from grpo.modalities.shared.packed import Layout, numbered
from grpo.modalities.shared.restoring import restore_round
from grpo.runtime.machine import DTYPES
from grpo.types import Cost, StepLogProbs


class DenoisingPolicy(Policy[DenoisingTrajectory]):
    """A pipeline with its sampling settings; only the transformer is trained."""

    def __init__(
        self, pipeline: Any, *, decoding: Denoising, canvas: Canvas, num_tokens: int
    ) -> None:
        """Args:
        pipeline: From `grpo.modalities.denoising.pipelines.load_pipeline`.
        num_tokens: Caption length of the T5 encoder.
        """
        self.pipeline = pipeline
        self.decoding = decoding
        self.canvas = canvas
        self.num_tokens = num_tokens
        self.judge: Judgement | None = None  # judges the pilots of a scope
        self.cost = Cost()

    @property
    def model(self) -> nn.Module:
        """The transformer, or its wrapper with adapters."""
        transformer: nn.Module = self.pipeline.transformer
        return transformer

    def schedule(self) -> Schedule:
        """Returns the time and both kernels, without and with noise, of every step."""
        sigmas = sigmas_of(self.pipeline, self.decoding.num_steps, self.canvas)
        return make_schedule(sigmas, self.decoding)

    @torch.no_grad()
    def sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
        """Returns rollouts and log-probs in nats of the steps with noise, 0 elsewhere.

        The rollouts of a prompt have noise at the same steps (rule U4) and different initial noise.
        With the density "matched", sampling is deterministic; at the chosen steps the final image
        is noised again and the model's velocity is compared with the true one. Prompt variants
        affect sampling only; log-probs use the unchanged prompts.

        Raises:
          ValueError: If the decoding has a scope and the policy has no judge for its pilots.
        """
        schedule = self.schedule()
        conditions = self._encode_on_host(prompts)
        group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(group_sizes))
        windows = self._find_windows(prompts, conditions, schedule, generator)
        mask = self._choose_steps(windows, generator)[group]
        start = torch.randn(
            len(group), *latent_shape(self.pipeline, self.canvas), generator=generator
        )
        variant, given_at = self._choose_variants(prompts, conditions, group, generator)
        is_matched = self.decoding.density == MATCHED
        noisy = mask & (not is_matched)
        clean, before, after, logp = self._denoise(start, noisy, given_at, schedule, generator)
        if is_matched:
            before, after = match_velocity(clean, mask, schedule, generator)
        self.cost += Cost(sampled_steps=mask.numel())
        trajectory = DenoisingTrajectory(
            group=group,
            conditions=conditions,
            variant=variant,
            mask=mask,
            before=before,
            after=after,
            noise=schedule.noise_at(mask),
            media=to_pixels(self.pipeline, clean.to(self._device)),
        )
        return trajectory, self.log_prob(trajectory) if is_matched else logp

    def _denoise(
        self,
        state: Float[Tensor, " rollout *sample"],
        noisy: Bool[Tensor, "rollout step"],
        given_at: Callable[[float], Mapping[str, Tensor]],
        schedule: Schedule,
        generator: Generator,
    ) -> tuple[
        Float[Tensor, " rollout *sample"],
        Float[Tensor, " drawn *sample"],
        Float[Tensor, " drawn *sample"],
        Float[Tensor, "rollout step"],
    ]:
        """Returns the last state, the states before and after every noisy step, and log-probs.

        Args:
          given_at: Maps a noise level to the rollouts' conditions.
        """
        shape, index = state.shape[1:], numbered(noisy)
        before = torch.empty(int(noisy.sum()), *shape)
        after = torch.empty_like(before)
        logp = torch.zeros(noisy.shape)
        for step in range(self.decoding.num_steps):
            rows = noisy[:, step].nonzero()[:, 0]
            kernels = [
                (schedule.noisy if drawn else schedule.exact)[step]
                for drawn in noisy[:, step].tolist()
            ]
            time = schedule.time[step].expand(len(state))
            velocity = self._velocity(state, time, given_at(float(time[0]) / TIME))
            mean, std = apply_kernel(kernels, state, velocity)
            if len(rows):
                before[index[rows, step]] = state[rows]
                noise = torch.randn(len(rows), *shape, generator=generator)
                drawn = mean[rows] + std[rows].view(-1, *[1] * len(shape)) * noise
                logp[rows, step] = step_log_prob(drawn, mean[rows], std[rows])
                mean[rows] = after[index[rows, step]] = drawn
            state = mean
        return state, before, after, logp

    def step_log_probs(
        self,
        trajectory: DenoisingTrajectory,
        needed: Bool[Tensor, "rollout step"] | None = None,
        *,
        with_entropy: bool = False,
    ) -> StepLogProbs:
        """Returns log-probs in nats, summed over dimensions, and standardized means.

        Computes only the needed steps; log-probs are 0 elsewhere.

        Raises:
          ValueError: If a needed step has no noise and so no density (rule U7).
        """
        chosen = trajectory.mask if needed is None else needed.cpu()
        if (chosen & ~trajectory.mask).any():
            raise ValueError("U7: log_prob needs steps with noise: without it there is no density")
        rows, steps = chosen.nonzero(as_tuple=True)
        if len(rows) == 0:
            return StepLogProbs(logp=torch.zeros(chosen.shape), mean=trajectory.before[:0])
        drawn = numbered(trajectory.mask)[rows, steps]
        before = trajectory.before[drawn]
        schedule = self.schedule()
        prompts = trajectory.group[rows]
        given = {name: each[prompts] for name, each in trajectory.conditions.items()}
        velocity = self._velocity(before, schedule.time[steps], given)
        kernels = [schedule.noisy[step] for step in steps.tolist()]
        mean, std = apply_kernel(kernels, before, velocity)
        logp = step_log_prob(trajectory.after[drawn], mean, std)
        return StepLogProbs(
            logp=torch.zeros(chosen.shape).masked_scatter(chosen, logp),
            mean=mean / std.view(-1, *[1] * (mean.dim() - 1)),
        )

    def decode(self, trajectory: DenoisingTrajectory) -> list[str]:
        """Returns empty texts: judges read `media`."""
        return [""] * len(trajectory.group)

    def is_finished(self, trajectory: DenoisingTrajectory) -> Bool[Tensor, " rollout"]:
        """Returns True for all: the number of steps is fixed."""
        return torch.ones(len(trajectory.group), dtype=torch.bool)

    def widths(
        self,
        trajectory: DenoisingTrajectory,
        rows: Int[Tensor, " kept"],
        needed: Bool[Tensor, "kept step"],
    ) -> Int[Tensor, " kept"]:
        """Returns the length of the transformer's sequence times the number of needed steps."""
        widths: Tensor = needed.sum(dim=1) * num_positions(self.pipeline, self.canvas)
        return widths

    @property
    def layout(self) -> Layout:
        """The layout of stored rollouts and conditions."""
        return layout_of(condition_names(self.pipeline))

    def restore(
        self, tensors: dict[str, Tensor], row: Int[Tensor, " rollout"]
    ) -> tuple[DenoisingTrajectory, Float[Tensor, "rollout step"]]:
        """Returns a stored trajectory and its behavior log-probs.

        Raises:
          ArtifactError: If a group has noise at different steps (rule U4).
        """
        return restore_draws(tensors, row, self.schedule())

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def _encode(self, captions: list[str]) -> dict[str, Tensor]:
        return encode_captions(self.pipeline, captions, self.num_tokens)

    @cached_property
    def _blank(self) -> dict[str, Tensor]:
        """The condition of the empty caption, for classifier-free guidance."""
        return self._encode([""])

    def _encode_on_host(self, captions: list[str]) -> dict[str, Tensor]:
        return {name: each.cpu() for name, each in self._encode(captions).items()}

    def _find_windows(
        self,
        prompts: list[str],
        conditions: Mapping[str, Tensor],
        schedule: Schedule,
        generator: Generator,
    ) -> Int[Tensor, "prompt 2"]:
        """Returns the half-open window [first, end) of noisy steps for each prompt.

        With a scope, a prompt's window is the median over its pilots.
        """
        first, end = self.decoding.window
        scope = self.decoding.scope
        if scope is None:
            end = min(end, self.decoding.num_steps - 1)
            return torch.tensor([[first, end]]).expand(len(prompts), 2)
        if self.judge is None:
            raise ValueError("a scope needs a judge for its pilots; set the policy's judge")
        pilots = self._run_pilots(conditions, schedule, scope, generator)
        captions = [each for each in prompts for _ in range(scope.pilots)]
        scores = torch.tensor([self.judge(captions, media) for media in pilots.media])
        self.cost += Cost(judge_calls=scores.numel())
        windows = find_windows(
            pilots.structure(), scores, pilots.steps, scope, self.decoding.num_steps
        )
        by_prompt: Tensor = windows.unflatten(0, (-1, scope.pilots)).median(dim=1).values
        return by_prompt

    def _run_pilots(
        self,
        conditions: Mapping[str, Tensor],
        schedule: Schedule,
        scope: Scope,
        generator: Generator,
    ) -> Pilots:
        """Returns pilots: rollouts without noise, with their clean estimates at the looks."""
        given = {name: each.repeat_interleave(scope.pilots, 0) for name, each in conditions.items()}
        number = len(next(iter(given.values())))
        shape = latent_shape(self.pipeline, self.canvas)
        state = torch.randn(number, *shape, generator=generator)
        steps, estimates = list(range(0, self.decoding.num_steps, scope.steps_per_look)), []
        for step, kernel in enumerate(schedule.exact):
            velocity = self._velocity(state, schedule.time[step].expand(number), given)
            if step in steps:
                estimates.append(state - schedule.time[step] / TIME * velocity)
            state, _ = apply_kernel([kernel] * number, state, velocity)
        self.cost += Cost(sampled_steps=number * self.decoding.num_steps)
        media = [to_pixels(self.pipeline, each.to(self._device)) for each in estimates]
        return Pilots(steps, torch.stack(estimates), torch.stack(media), state)

    def _choose_steps(
        self, windows: Int[Tensor, "prompt 2"], generator: Generator
    ) -> Bool[Tensor, "prompt step"]:
        """Returns the noisy steps of each prompt; the last step never has noise."""
        mask = torch.zeros(len(windows), self.decoding.num_steps, dtype=torch.bool)
        for row, (first, end) in zip(mask, windows.tolist(), strict=True):
            if self.decoding.stochastic == "all":
                row[first:end] = True
            elif self.decoding.stochastic == "one_per_prompt":
                row[torch.randint(first, end, (), generator=generator)] = True
        return mask

    def _choose_variants(
        self,
        prompts: list[str],
        conditions: dict[str, Tensor],
        group: Int[Tensor, " rollout"],
        generator: Generator,
    ) -> tuple[Int[Tensor, " rollout"], Callable[[float], dict[str, Tensor]]]:
        """Returns each rollout's prompt variant and a map from noise level to conditions."""
        settings = self.decoding.variants
        if settings is None:
            given = {name: each[group] for name, each in conditions.items()}
            return torch.zeros_like(group), lambda sigma: given
        found, flops = find_variants(self.pipeline, prompts, self.num_tokens, settings, generator)
        self.cost += Cost(flops=flops)
        variants = {name: each.cpu() for name, each in found.items()}
        member = torch.arange(len(group)) - torch.searchsorted(group, group)
        variant = member % settings.count
        return variant, lambda sigma: blend(
            conditions, variants, group, variant, variant_weight(sigma, settings.share)
        )

    def _velocity(
        self,
        state: Float[Tensor, " row *sample"],
        time: Float[Tensor, " row"],
        conditions: Mapping[str, Float[Tensor, "row ..."]],
    ) -> Float[Tensor, " row *sample"]:
        """Returns the velocity with classifier-free guidance, on the host in float32."""
        velocity = self._forward(state, time, conditions)
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
        """Returns the transformer's output and adds the pass to the cost."""
        output = self._run(state, time, conditions)
        per_row = self._training_flops if torch.is_grad_enabled() else self._forward_flops
        self.cost += Cost(flops=len(state) * per_row)
        result: Tensor = output.float().cpu()
        return result

    def _run(
        self, state: Tensor, time: Float[Tensor, " row"], conditions: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the transformer's output on its device and in its dtype."""
        # Not the dtype of a parameter: a class may keep some modules in float32.
        dtype: torch.dtype = self.pipeline.transformer.dtype
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
        """Returns the FLOPs of one row by torch's counter; the total is linear in rows."""
        state = torch.zeros(1, *latent_shape(self.pipeline, self.canvas))
        return count_pass(
            lambda: self._run(state, torch.zeros(1), self._blank).float(),
            list(self.model.parameters()),
            backward,
        )


def load_denoising_policy(
    params: RunParams[DenoisingPolicyParams], *, base: Path, directory: Path, decoding: Denoising
) -> DenoisingPolicy:
    """Returns the policy of a directory on the machine's device, without dropout.

    Args:
      base: The base policy's directory. A different `directory` holds the trained weights.

    Raises:
      ArtifactError: If a file is missing or broken, or has unsupported components or settings.
      ParameterError: If the pipeline cannot generate the canvas.
    """
    settings = params.policy
    pipeline = load_pipeline(base, DTYPES[params.machine.dtype])
    unread = find_unsupported_component(read_index(base)) or find_unsupported_setting(pipeline)
    if unread:
        raise ArtifactError(f"{base}: {unread}")
    require_canvas(pipeline, settings.canvas)
    restore_round(params, pipeline.transformer, base=base, directory=directory)
    pipeline.to(params.machine.device)
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=settings.canvas,
        num_tokens=settings.caption_tokens,
    )
