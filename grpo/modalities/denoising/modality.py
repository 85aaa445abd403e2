"""The modality of denoising steps, as the core knows it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.modalities.denoising.parameters import (
    DenoisingDraws,
    DenoisingPolicyParams,
    DenoisingSampling,
    ScratchFlowBase,
)
from grpo.modalities.modality import Judgement, Modality, RunParams

if TYPE_CHECKING:
    from grpo.modalities.denoising.policy import DenoisingPolicy
    from grpo.modalities.denoising.sde_steps import Denoising as Draws
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy


class Denoising(Modality[DenoisingPolicyParams, DenoisingSampling, DenoisingDraws]):
    """Flow-matching models of diffusers, whose step is a denoising step."""

    kind = "denoising"
    policy = DenoisingPolicyParams
    sampling = DenoisingSampling
    evaluation_sampling = DenoisingDraws
    tasks = ("glyphs", "jsonl")
    judged = "media"
    step_name = "denoising step"
    has_greedy = False  # noise cannot be chosen greedily

    def find_wrong(self, params: RunParams[DenoisingPolicyParams], judge: str) -> Iterator[str]:
        """Yields where parameters disagree whether images or clips are drawn."""
        frames, base = params.policy.canvas.frames, params.policy.base
        has_frames = frames > 1
        moved = getattr(params.task, "pixels_per_frame", None)
        if params.task.kind == "glyphs" and (moved is not None) != has_frames:
            yield (
                "task.pixels_per_frame and more than one of policy.canvas.frames need each other, "
                f"got {moved} and {frames}"
            )
        if isinstance(base, ScratchFlowBase) and (base.architecture == "WanPipeline") != has_frames:
            yield (
                "policy.base.architecture must be WanPipeline for clips and "
                f"StableDiffusion3Pipeline for images, got {base.architecture} with {frames} of "
                "policy.canvas.frames"
            )
        if judge == "moving_ocr" and moved is None:
            yield "reward.judge moving_ocr needs task.pixels_per_frame, got none"
        yield from super().find_wrong(params, judge)

    def rule_facts(
        self, policy: DenoisingPolicyParams, sampling: DenoisingSampling
    ) -> dict[str, Any]:
        owners = {"scope": sampling.scope, "window_stride": sampling.window_stride}
        return {
            "denoises": True,
            "density": sampling.density,
            "stochastic": sampling.stochastic,
            "owners": tuple(f"sampling.{name}" for name, each in owners.items() if each),
            "has_variants": sampling.variants is not None,
        }

    def make_base(self, params: RunParams[DenoisingPolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.denoising.bases import make_base_policy

        return make_base_policy(params, data)

    def round_draws(
        self, policy: DenoisingPolicyParams, sampling: DenoisingSampling, *, rounds_behind: int
    ) -> "Draws":
        """Returns draws whose window of steps with noise moves from round to round."""
        from grpo.modalities.denoising.sde_steps import Denoising as Draws

        draws = Draws(
            num_steps=sampling.num_steps,
            density=sampling.density,
            noise_level=sampling.noise_level,
            stochastic=sampling.stochastic,
            window=sampling.window,
            guidance=sampling.guidance,
            scope=sampling.scope,
            variants=sampling.variants,
        )
        first, end = sampling.window
        end = min(end, sampling.num_steps - 1)
        positions = sampling.num_steps - (end - first)
        # From the last position it starts over.
        first, end = (each + sampling.window_stride * rounds_behind for each in (first, end))
        width, first = end - first, first % positions
        return replace(draws, window=(first, first + width))

    def evaluation_draws(
        self, policy: DenoisingPolicyParams, sampling: DenoisingDraws
    ) -> dict[str, "Draws"]:
        """Returns denoising without noise in its steps: only the start is drawn."""
        from grpo.modalities.denoising.sde_steps import Denoising as Draws

        exact = Draws(
            num_steps=sampling.num_steps,
            density="flow_sde",
            noise_level=1.0,
            stochastic="none",
            window=(0, sampling.num_steps),
            guidance=sampling.guidance,
        )
        return {"sampled": exact}

    def find_unlike_profile(self, sampling: DenoisingSampling, profiled: DenoisingDraws) -> str:
        return (
            "selection must not hold reuse_profile_rollouts: the profile draws without noise in "
            "its steps, which have no density then"
        )

    def judges_while_sampling(self, sampling: DenoisingSampling) -> bool:
        """Returns whether pilots are judged."""
        return sampling.scope is not None

    def load_policy(
        self,
        params: RunParams[DenoisingPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Draws",
        sharing: int = 1,
    ) -> "DenoisingPolicy":
        from grpo.modalities.denoising.loading import load_denoising_policy

        return load_denoising_policy(params, base=base, directory=directory, decoding=draws)

    def load_sampler(
        self,
        params: RunParams[DenoisingPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Draws",
        sharing: int = 1,
        judge: Judgement | None = None,
    ) -> "DenoisingPolicy":
        policy = self.load_policy(params, base=base, directory=directory, draws=draws)
        policy.judge = judge
        return policy

    def layout(self, policy: DenoisingPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.denoising.pipelines import stored_condition_names
        from grpo.modalities.denoising.trajectories import layout_of

        return layout_of(stored_condition_names(base))
