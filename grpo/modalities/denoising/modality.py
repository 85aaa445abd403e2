"""The modality of denoising steps: its parameters and its implementation of `Modality`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo.modalities.modality import (
    Judgement,
    Lora,
    Modality,
    PolicyParams,
    RunParams,
    SamplingParams,
)
from grpo.schema import (
    DirectoryBase,
    Fraction,
    HubBase,
    Name,
    NonNegative,
    Pixels,
    Positive,
    Rate,
    Rollouts,
    S3Base,
    Steps,
    Strict,
)

if TYPE_CHECKING:
    import pandas as pd

    from grpo.modalities.denoising.policy import DenoisingPolicy
    from grpo.modalities.denoising.sde_steps import Denoising as Draws
    from grpo.modalities.policy import Policy
    from grpo.modalities.shared.exhibits import Picture
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.runtime.artifacts.stored_iterations import IterationFiles
    from grpo.runtime.dry_run import DryRun


NoiseSteps = Annotated[int, Field(ge=2, le=10**4)]  # length of a denoising schedule
Density = Literal["flow_sde", "constant_sde", "interpolated_sde", "preserving", "matched"]


class FlowWarmup(Strict):
    """Flow matching on drawings of captions, up to partial skill."""

    prompts: Positive
    shares: dict[Name, Rate]  # family -> relative share of the prompts
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    wrong_fraction: Fraction  # drawings of another prompt's text
    blank_fraction: Fraction  # rows with an empty caption, for classifier-free guidance
    font_size: Pixels
    character_width: Pixels


class ScratchFlowBase(Strict):
    """A fresh pipeline of a `diffusers` class in pixel space, with fresh text encoders."""

    source: Literal["scratch"]
    architecture: Literal["StableDiffusion3Pipeline", "WanPipeline"]
    transformer: dict[str, int | float | str | bool | tuple[int, int, int]]
    text_encoder: dict[str, int | float | str | bool]
    embedding_std: Rate  # of the text encoders' embeddings; the default of CLIP is 0.02, of T5 1
    position_std: Rate | None  # of T5's relative position biases; null: T5's default, or CLIP
    shift: Rate  # of the scheduler's sigmas
    warmup: FlowWarmup


FlowBase = Annotated[
    ScratchFlowBase | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]


class Canvas(Strict):
    """Size of the generated images or clips."""

    frames: Annotated[int, Field(gt=0, le=4096)]  # 1: an image; more: a clip
    height: Pixels
    width: Pixels


class DenoisingPolicyParams(PolicyParams):
    """A flow-matching model."""

    kind: Literal["denoising"]
    base: FlowBase
    lora: Lora | None
    recompute: bool  # gradient checkpointing of the blocks: less memory, more time
    canvas: Canvas
    caption_tokens: Steps  # caption length of the T5 encoder; 1 without T5

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        if not isinstance(base, ScratchFlowBase):
            return {}
        return {
            "policy.base.transformer": base.transformer,
            "policy.base.text_encoder": base.text_encoder,
        }


class Scope(Strict):
    """AdaScope: chooses the noisy steps of each prompt by pilot rollouts without noise."""

    pilots: Rollouts
    steps_per_look: Positive  # a look judges the clean estimate; 1: at every step
    smoothing: Annotated[float, Field(gt=0, le=1)]  # weight of a new gain in its moving average
    structure_tolerance: NonNegative  # in largest gains; smaller changes count as none
    preference_tolerance: NonNegative  # in largest gains; below it, the reward has settled
    patience: Positive  # consecutive looks that must agree
    first_look: Annotated[int, Field(ge=0)]  # earliest look at which structure can have formed
    fallback: tuple[Fraction, Fraction]  # first and last step as fractions, if none is found


class Variants(Strict):
    """E2PO: samples some rollouts of a prompt under perturbed embeddings of it."""

    count: Annotated[int, Field(ge=2, le=65536)]  # per prompt, the unchanged prompt included
    similarity: Fraction  # cosine of a variant's pooled embedding with the prompt's
    tolerance: NonNegative  # allowed deviation of that cosine
    diversity: NonNegative  # loss weight of the cosine between variants
    init: NonNegative  # deviation of the initial perturbation, in units of the embeddings' rms
    updates: Annotated[int, Field(ge=0)]
    learning_rate: Rate  # of the perturbation, in units of the embeddings' rms
    share: Annotated[float, Field(gt=0, le=1)]  # part of the schedule with variants, noisiest first


class DenoisingSampling(SamplingParams):
    """Sampling parameters of an arm. They define the density of log-probs."""

    num_steps: NoiseSteps
    density: Density
    noise_level: Rate  # in units of `density`
    stochastic: Literal["all", "one_per_prompt"]  # the noisy steps within the window
    window: tuple[Annotated[int, Field(ge=0)], Positive]  # half-open range of steps
    window_stride: Annotated[int, Field(ge=0)]  # shift of the window per iteration; 0: fixed
    scope: Scope | None  # measures a window per prompt instead
    variants: Variants | None
    guidance: Rate  # 1: none

    @model_validator(mode="after")
    def _has_steps_with_noise(self) -> "DenoisingSampling":
        first, end = self.window
        if first >= min(end, self.num_steps - 1):
            raise ValueError(f"window must hold a step before the last of {self.num_steps}")
        if self.density == "preserving" and self.noise_level > 1:
            raise ValueError("noise_level must be at most 1 for preserving")
        if self.scope and self.scope.steps_per_look * 3 > self.num_steps:
            raise ValueError("scope.steps_per_look must leave three looks or more at num_steps")
        return self


class DenoisingDraws(Strict):
    """Sampling parameters of evaluation and profile: steps without noise."""

    num_steps: NoiseSteps
    guidance: Rate  # 1: none


class Denoising(Modality[DenoisingPolicyParams, DenoisingSampling, DenoisingDraws]):
    """Flow-matching models of diffusers; a step is a denoising step."""

    kind = "denoising"
    policy = DenoisingPolicyParams
    sampling = DenoisingSampling
    evaluation_sampling = DenoisingDraws
    prompt_kind = "caption"
    output_kind = "media"
    step_name = "denoising step"
    has_library_format = True
    has_greedy = False  # the initial noise has no greedy choice

    def find_conflicts(self, params: RunParams[DenoisingPolicyParams], judge: str) -> Iterator[str]:
        """Yields parameters that disagree about images and clips."""
        frames, base = params.policy.canvas.frames, params.policy.base
        has_frames = frames > 1
        moved = getattr(params.task, "pixels_per_frame", None)
        if hasattr(params.task, "pixels_per_frame") and (moved is not None) != has_frames:
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
            yield "the judge moving_ocr needs task.pixels_per_frame, got none"
        yield from super().find_conflicts(params, judge)

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

    def step_limit(self, policy: DenoisingPolicyParams, sampling: DenoisingSampling) -> int:
        return sampling.num_steps

    def round_draws(
        self, policy: DenoisingPolicyParams, sampling: DenoisingSampling, *, iterations_behind: int
    ) -> "Draws":
        """Returns a decoding whose window of noisy steps moves by `window_stride` per iteration."""
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
        # The window wraps around after the last position.
        first, end = (each + sampling.window_stride * iterations_behind for each in (first, end))
        width, first = end - first, first % positions
        return replace(draws, window=(first, first + width))

    def evaluation_draws(
        self, policy: DenoisingPolicyParams, sampling: DenoisingDraws
    ) -> dict[str, "Draws"]:
        """Returns a decoding without noise in the steps; only the initial noise is random."""
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

    def find_profile_mismatch(self, sampling: DenoisingSampling, profiled: DenoisingDraws) -> str:
        return (
            "selection must not hold reuse_profile_rollouts: the profile samples without noise in "
            "its steps, so they have no density"
        )

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[DenoisingPolicyParams],
        files: "IterationFiles",
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
        *,
        has_media: bool,
    ) -> "Sequence[Picture | None]":
        """Returns the generated images, or None where they are not stored."""
        if not has_media:
            return [None] * len(chosen)
        from grpo.modalities.shared.exhibits import read_pictures

        return read_pictures(files.tensors, chosen["row"].tolist())

    def judges_while_sampling(self, sampling: DenoisingSampling) -> bool:
        """Returns whether the decoding has a scope, whose pilots are judged."""
        return sampling.scope is not None

    def load_policy(
        self,
        params: RunParams[DenoisingPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Draws",
        policies_per_host: int = 1,
    ) -> "DenoisingPolicy":
        from grpo.modalities.denoising.policy import load_denoising_policy

        return load_denoising_policy(params, base=base, directory=directory, decoding=draws)

    def load_sampler(
        self,
        params: RunParams[DenoisingPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: "Draws",
        policies_per_host: int = 1,
        judge: Judgement | None = None,
    ) -> "DenoisingPolicy":
        policy = self.load_policy(params, base=base, directory=directory, draws=draws)
        policy.judge = judge
        return policy

    def share_sampler(
        self,
        params: RunParams[DenoisingPolicyParams],
        policy: "Policy[Any]",
        judge: Judgement | None = None,
    ) -> "Policy[Any]":
        from grpo.modalities.denoising.policy import DenoisingPolicy

        assert isinstance(policy, DenoisingPolicy)
        policy.judge = judge
        return policy

    def load_unfilled(
        self, params: RunParams[DenoisingPolicyParams], *, data: Path, draws: "Draws", run: "DryRun"
    ) -> "DenoisingPolicy":
        from grpo.modalities.denoising.bases import load_unfilled

        return load_unfilled(params, data=data, decoding=draws, run=run)

    def layout(self, policy: DenoisingPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.denoising.pipelines import stored_condition_names
        from grpo.modalities.denoising.trajectories import layout_of

        return layout_of(stored_condition_names(base))
