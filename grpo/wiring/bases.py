"""Base policies from parameters: fresh or imported, with the warm-up that a fresh one needs."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from grpo.errors import DivergedError, ParameterError, located
from grpo.modalities.shared.directories import PolicyState, save_base, write_state
from grpo.modalities.shared.warmup import WarmupSettings, WarmupUpdate, warm_up
from grpo.modalities.tokens.bases import make_base
from grpo.modalities.tokens.probing import require_sampling
from grpo.params.parameters import PARAMS, Parameters
from grpo.params.policy import (
    ActionChunkPolicyParams,
    Cloning,
    DenoisingPolicyParams,
    FlowWarmup,
    ScratchBase,
    ScratchFlowBase,
    Warmup,
)
from grpo.params.task import GlyphsTask
from grpo.runtime.seeds import derive_seed


class Base(NamedTuple):
    """A base policy as it comes."""

    num_updates: int  # of its warm-up
    warm_up: Callable[[pd.DataFrame], Iterator[WarmupUpdate]]  # on a table of schema WARMUP
    save: Callable[[Path], None]


def build_base(params: Parameters, data: Path) -> Base:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
      ArtifactError: If a model cannot be sampled.
      MissingExtraError: If the package of a GGUF is not installed.
    """
    if isinstance(params.policy, DenoisingPolicyParams):
        return _denoising(params, params.policy, data)
    if isinstance(params.policy, ActionChunkPolicyParams):
        return _action_chunks(params, params.policy, data)
    model, tokenizer = make_base(params, data)
    nn.Module.to(model, params.machine.device)
    if params.tokens.sampler == "transformers":
        with located(f"{PARAMS}: policy.base"):
            require_sampling(model)
    fresh = params.tokens.base
    settings = settings_of(fresh.warmup, params.seed) if isinstance(fresh, ScratchBase) else None

    def train(table: pd.DataFrame) -> Iterator[WarmupUpdate]:
        pairs = list(zip(table["prompt"], table["solution"]))
        if settings is None:
            return iter(())
        return _remedy_named(warm_up(model, tokenizer, pairs, settings), settings)

    return Base(
        num_updates=settings.updates if settings else 0,
        warm_up=train,
        save=partial(save_base, model=model, tokenizer=tokenizer),
    )


def settings_of(warmup: Warmup | FlowWarmup | Cloning, seed: int) -> WarmupSettings:
    """Returns how a fresh base is warmed up.

    Args:
      seed: The run's.
    """
    return WarmupSettings(
        updates=warmup.updates,
        rows_per_update=warmup.rows_per_update,
        learning_rate=warmup.learning_rate,
        seed=derive_seed(seed, "warmup"),
    )


def _remedy_named(
    updates: Iterator[WarmupUpdate], settings: WarmupSettings
) -> Iterator[WarmupUpdate]:
    """Yields the updates; an error says that it is the warm-up, and which parameter to lower."""
    try:
        yield from updates
    except DivergedError as error:
        raise DivergedError(
            f"warm-up of the base diverged at {error}; lower policy.base.warmup.learning_rate, "
            f"which is {settings.learning_rate:g}, in {PARAMS}"
        ) from None


def _action_chunks(params: Parameters, policy: ActionChunkPolicyParams, data: Path) -> Base:
    # Imported here: other kinds need no simulator.
    from grpo.modalities.action_chunks.bases import clone_experts, make_action_model
    from grpo.modalities.action_chunks.model import save_action_model

    model, tokenizer = make_action_model(params, data)
    settings = settings_of(policy.base.warmup, params.seed)

    def save(directory: Path) -> None:
        save_action_model(directory, model, tokenizer)
        write_state(directory, PolicyState(name="base"))

    return Base(
        num_updates=settings.updates,
        warm_up=lambda table: _remedy_named(
            clone_experts(policy, model, tokenizer, table, settings), settings
        ),
        save=save,
    )


def _denoising(params: Parameters, policy: DenoisingPolicyParams, data: Path) -> Base:
    # Imported here: diffusers takes seconds that a run of token policies need not wait.
    from grpo.modalities.denoising.bases import make_pipeline
    from grpo.modalities.denoising.pipelines import save_pipeline

    pipeline = make_pipeline(params, data)
    pipeline.to(params.machine.device)
    warmup = policy.base.warmup if isinstance(policy.base, ScratchFlowBase) else None

    def save(directory: Path) -> None:
        save_pipeline(directory, pipeline)
        write_state(directory, PolicyState(name="base"))

    def train(table: pd.DataFrame) -> Iterator[WarmupUpdate]:
        return iter(()) if warmup is None else _match_flow(params, policy, warmup, pipeline, table)

    return Base(num_updates=warmup.updates if warmup else 0, warm_up=train, save=save)


def _match_flow(
    params: Parameters,
    policy: DenoisingPolicyParams,
    warmup: FlowWarmup,
    pipeline: Any,
    table: pd.DataFrame,
) -> Iterator[WarmupUpdate]:
    """Trains a fresh pipeline on drawings of a table of schema WARMUP."""
    from grpo.modalities.denoising.flow_matching import Drawings, match_flow
    from grpo.tasks import glyphs

    canvas, task = policy.canvas, params.task
    assert isinstance(task, GlyphsTask)
    _require_room(policy, warmup, pipeline, task, table["solution"].tolist())
    drawing = glyphs.Drawing(canvas.height, canvas.width, warmup.font_size, warmup.character_width)
    texts, moved = table["solution"].tolist(), task.pixels_per_frame
    if moved is None:
        pixels = glyphs.draw_texts(texts, drawing)
    else:
        pixels = glyphs.draw_clips(texts, drawing, frames=canvas.frames, pixels_per_frame=moved)
    settings = settings_of(warmup, params.seed)
    updates = match_flow(
        pipeline,
        Drawings(captions=table["prompt"].tolist(), pixels=torch.from_numpy(pixels)),
        settings,
        num_tokens=policy.caption_tokens,
        blank_fraction=warmup.blank_fraction,
    )
    return _remedy_named(updates, settings)


def _require_room(
    policy: DenoisingPolicyParams,
    warmup: FlowWarmup,
    pipeline: Any,
    task: GlyphsTask,
    texts: list[str],
) -> None:
    """Raises ParameterError unless the longest text fits the text encoders and the canvas.

    They would cut it in silence.
    """
    from grpo.tasks import glyphs

    longest = max(map(len, texts))
    tokens = longest + 2  # one byte a character, between two marks
    if task.pixels_per_frame is None:
        room, name = pipeline.tokenizer_max_length, "base.text_encoder.max_position_embeddings"
    else:
        room, name = policy.caption_tokens, "caption_tokens"
        longest = max(len(glyphs.split_text(text)[0]) for text in texts)
    if tokens > room:
        raise ParameterError(
            f"{PARAMS}: policy.{name} must be at least {tokens} "
            f"for texts of {tokens - 2} characters, got {room}"
        )
    width = longest * warmup.character_width
    if width > policy.canvas.width:
        raise ParameterError(
            f"{PARAMS}: policy.canvas.width must be at least {width} for {longest} characters of "
            f"{warmup.character_width} pixels, got {policy.canvas.width}"
        )
