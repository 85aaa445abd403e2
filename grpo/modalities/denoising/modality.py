"""The modality of denoising steps: its parameters, and what the core may ask of it."""

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
    from grpo.modalities.shared.exhibits import Picture
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy


NoiseSteps = Annotated[int, Field(ge=2, le=10**4)]  # of a denoising schedule
Density = Literal["flow_sde", "constant_sde", "interpolated_sde", "preserving", "matched"]


class FlowWarmup(Strict):
    """Flow matching on drawn captions, to partial skill."""

    prompts: Positive
    shares: dict[Name, Rate]  # family -> its share of the prompts, in any unit
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    wrong_fraction: Fraction  # drawings that show another prompt's text
    blank_fraction: Fraction  # trained without a caption: what guidance leads away from
    font_size: Pixels
    character_width: Pixels


class ScratchFlowBase(Strict):
    """A fresh pipeline of a `diffusers` class on pixels, with text encoders of its own."""

    source: Literal["scratch"]
    architecture: Literal["StableDiffusion3Pipeline", "WanPipeline"]
    transformer: dict[str, int | float | str | bool | tuple[int, int, int]]
    text_encoder: dict[str, int | float | str | bool]
    embedding_std: Rate  # of the text encoders' embeddings; CLIP's own is 0.02, T5's 1
    position_std: Rate | None  # of T5's biases by relative position; null: its own, or CLIP
    shift: Rate  # of the scheduler's sigmas
    warmup: FlowWarmup


FlowBase = Annotated[
    ScratchFlowBase | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]


class Canvas(Strict):
    """What is drawn, in pixels."""

    frames: Annotated[int, Field(gt=0, le=4096)]  # of a clip; 1: an image
    height: Pixels
    width: Pixels


class DenoisingPolicyParams(PolicyParams):
    """A flow-matching model."""

    kind: Literal["denoising"]
    base: FlowBase
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    canvas: Canvas
    caption_tokens: Steps  # of the T5 encoder; 1 if there is none

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        if not isinstance(base, ScratchFlowBase):
            return {}
        return {
            "policy.base.transformer": base.transformer,
            "policy.base.text_encoder": base.text_encoder,
        }


class Scope(Strict):
    """AdaScope: which steps of a prompt are worth noise, measured on pilots without noise."""

    pilots: Rollouts
    steps_per_look: Positive  # 1: every step's clean estimate is judged
    smoothing: Annotated[float, Field(gt=0, le=1)]  # of a gain in its moving average; 1: none
    structure_tolerance: NonNegative  # of the largest gain: a change below it is none
    preference_tolerance: NonNegative  # of the largest gain: below it a reward is settled
    patience: Positive  # looks in a row
    first_look: Annotated[int, Field(ge=0)]  # at which structure can have formed
    fallback: tuple[Fraction, Fraction]  # first and last step, in shares of all, if none is found


class Variants(Strict):
    """E2PO: perturbed embeddings of a prompt, under which some of its rollouts are drawn."""

    count: Annotated[int, Field(ge=2, le=65536)]  # of a prompt; the first is the prompt as it is
    similarity: Fraction  # cosine of a variant's pooled embedding with the prompt's
    tolerance: NonNegative  # of that cosine
    diversity: NonNegative  # weight of the cosine between variants
    init: NonNegative  # deviation of the first perturbation, in units of the embeddings' rms
    updates: Annotated[int, Field(ge=0)]
    learning_rate: Rate  # of the perturbation, in units of the embeddings' rms
    share: Annotated[float, Field(gt=0, le=1)]  # of the schedule, from its noisy end, that varies


class DenoisingSampling(SamplingParams):
    """How rollouts are drawn: part of the density that is scored."""

    num_steps: NoiseSteps
    density: Density
    noise_level: Rate  # in units of the density
    stochastic: Literal["all", "one_per_prompt"]  # which steps of the window have noise
    window: tuple[Annotated[int, Field(ge=0)], Positive]  # first step that may, first that may not
    window_stride: Annotated[int, Field(ge=0)]  # by which it moves on every round; 0: it stays
    scope: Scope | None  # measures the window of each prompt instead
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
    """How evaluation and profile draw: without noise in the steps."""

    num_steps: NoiseSteps
    guidance: Rate  # 1: none


class Denoising(Modality[DenoisingPolicyParams, DenoisingSampling, DenoisingDraws]):
    """Flow-matching models of diffusers, whose step is a denoising step."""

    kind = "denoising"
    policy = DenoisingPolicyParams
    sampling = DenoisingSampling
    evaluation_sampling = DenoisingDraws
    asked = "caption"
    judged = "media"
    step_name = "denoising step"
    has_greedy = False  # noise cannot be chosen greedily

    def find_wrong(self, params: RunParams[DenoisingPolicyParams], judge: str) -> Iterator[str]:
        """Yields where parameters disagree whether images or clips are drawn."""
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

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[DenoisingPolicyParams],
        name: str,
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
    ) -> "Sequence[Picture]":
        """Returns what was drawn."""
        from grpo.modalities.shared.exhibits import read_pictures

        tensors = artifacts / "rollouts" / name / "tensors.safetensors"
        return read_pictures(tensors, chosen["row"].tolist())

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

    def layout(self, policy: DenoisingPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.denoising.pipelines import stored_condition_names
        from grpo.modalities.denoising.trajectories import layout_of

        return layout_of(stored_condition_names(base))
