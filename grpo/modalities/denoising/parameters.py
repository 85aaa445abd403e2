"""Parameters of denoising policies: where the base comes from, and how rollouts are drawn."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo.modalities.shared.parameters import Lora, PolicyParams, SamplingParams
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
