"""Base pipelines of denoising policies: fresh, or from a directory, the hub or S3."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, UMT5Config, UMT5EncoderModel

from grpo.errors import ParameterError, refused_by_library
from grpo.modalities.denoising.modality import DenoisingPolicyParams, FlowWarmup, ScratchFlowBase
from grpo.modalities.denoising.pipelines import (
    find_unsupported_component,
    find_unsupported_setting,
    library,
    require_canvas,
    save_pipeline,
    silence_diffusers,
)
from grpo.modalities.denoising.policy import DenoisingPolicy
from grpo.modalities.denoising.sde_steps import Denoising
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import PolicyState, find_wrong_weights, write_state
from grpo.modalities.shared.drawings import Drawing, draw_clips, draw_texts, split_text
from grpo.modalities.shared.models import require_known_keys
from grpo.modalities.shared.restoring import place_round
from grpo.modalities.shared.tokenizers import make_caption_tokenizer
from grpo.modalities.shared.warmup import BasePolicy, WarmupUpdate, warmup_settings, with_remedy
from grpo.runtime.dry_run import DryRun
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.runtime.sources import Source, find_local_source, find_source, refusal
from grpo.schema import PARAMS, DirectoryBase, HubBase, S3Base


def make_fresh_pipeline(base: ScratchFlowBase, dtype: torch.dtype, *, seed: int) -> Any:
    """Returns a fresh pipeline in pixel space, without an autoencoder.

    Raises:
      ParameterError: If a class refuses its configuration.
    """
    torch.manual_seed(seed)
    make = {"StableDiffusion3Pipeline": _make_sd3, "WanPipeline": _make_wan}[base.architecture]
    with refused_by_library(lambda why: ParameterError(f"{PARAMS}: policy.base is refused: {why}")):
        pipeline = make(base)
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.to(dtype).eval()
    return pipeline


def _make_sd3(base: ScratchFlowBase) -> Any:
    """Returns a Stable Diffusion 3 pipeline with two CLIP encoders and no T5."""
    encoders = [_clip_encoder(base) for _ in range(2)]
    widths: list[Any] = [each.config for each in encoders]
    tokenizer = make_caption_tokenizer()
    tokenizer.model_max_length = widths[0].max_position_embeddings
    return library.StableDiffusion3Pipeline(
        transformer=library.SD3Transformer2DModel(
            **base.transformer,
            joint_attention_dim=sum(each.hidden_size for each in widths),
            pooled_projection_dim=sum(each.projection_dim for each in widths),
        ),
        scheduler=library.FlowMatchEulerDiscreteScheduler(shift=base.shift),
        vae=None,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _make_wan(base: ScratchFlowBase) -> Any:
    """Returns a Wan pipeline with a UMT5 encoder.

    An orthogonal map embeds and reads out its patches, so that random initialization loses no
    information. Wan has only relative positions, so a small model can distinguish the first frame
    from the last only if one patch spans the whole clip.
    """
    encoder = _t5_encoder(base)
    transformer = library.WanTransformer3DModel(**base.transformer, text_dim=encoder.config.d_model)
    inner = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    held = prod(transformer.config.patch_size) * transformer.config.in_channels
    with torch.no_grad():
        basis = nn.init.orthogonal_(torch.empty(inner, held)) * (inner / held) ** 0.5
        transformer.patch_embedding.weight.copy_(basis.view_as(transformer.patch_embedding.weight))
        transformer.proj_out.weight.copy_(basis.T * held / inner)
        for bias in (transformer.patch_embedding.bias, transformer.proj_out.bias):
            bias.zero_()
    return library.WanPipeline(
        transformer=transformer,
        scheduler=library.FlowMatchEulerDiscreteScheduler(shift=base.shift),
        vae=None,
        text_encoder=encoder,
        tokenizer=make_caption_tokenizer(),
    )


def _clip_encoder(base: ScratchFlowBase) -> CLIPTextModelWithProjection:
    encoder = CLIPTextModelWithProjection(_configure(CLIPTextConfig, base, "bos_token_id"))
    embeddings = encoder.text_model.embeddings
    for each in (embeddings.token_embedding, embeddings.position_embedding):
        nn.init.normal_(each.weight, std=base.embedding_std)
    return encoder


def _t5_encoder(base: ScratchFlowBase) -> UMT5EncoderModel:
    encoder = UMT5EncoderModel(_configure(UMT5Config, base))
    nn.init.normal_(encoder.get_input_embeddings().weight, std=base.embedding_std)
    for name, weight in encoder.named_parameters():
        if "relative_attention_bias" in name and base.position_std is not None:
            nn.init.normal_(weight, std=base.position_std)
    return encoder


def _configure(kind: Any, base: ScratchFlowBase, *marks: str) -> Any:
    """Returns a text encoder's configuration for the caption tokenizer."""
    require_known_keys(kind, base.text_encoder, parameter="policy.base.text_encoder")
    tokenizer = make_caption_tokenizer()
    known = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", *marks)}
    return kind(**base.text_encoder, vocab_size=len(tokenizer), **known)


def make_base_policy(params: RunParams[DenoisingPolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
    """
    pipeline = make_pipeline(params, data)
    pipeline.to(params.machine.device)
    base = params.policy.base
    warmup = base.warmup if isinstance(base, ScratchFlowBase) else None

    def save(directory: Path) -> None:
        save_pipeline(directory, pipeline)
        write_state(directory, PolicyState(name="base"))

    def train(table: pd.DataFrame) -> Iterator[WarmupUpdate]:
        return iter(()) if warmup is None else _match_flow(params, warmup, pipeline, table)

    return BasePolicy(num_updates=warmup.updates if warmup else 0, warm_up=train, save=save)


def make_pipeline(params: RunParams[DenoisingPolicyParams], data: Path) -> Any:
    """Returns the base pipeline, before any warm-up.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
    """
    silence_diffusers()
    base = params.policy.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchFlowBase):
        return make_fresh_pipeline(base, dtype, seed=derive_seed(params.seed, "base"))
    return _from_pretrained(base, dtype, data)


def _from_pretrained(base: DirectoryBase | HubBase | S3Base, dtype: torch.dtype, data: Path) -> Any:
    """Returns a pipeline from a directory under data/, from the hub, or from S3.

    Raises:
      ParameterError: If the source does not exist or has unsupported components or settings.
    """
    source = find_source(base, data, parameter="policy.base")
    found = {"revision": source.revision, "local_files_only": source.is_local}
    with refused_by_library(lambda why: refusal(source, why)):
        # Checked before the download; diffusers silently drops components that it does not know.
        index = library.DiffusionPipeline.load_config(source.name, **found)
        if unread := find_unsupported_component(index):
            raise refusal(source, unread)
        options = {"dtype": dtype, "use_safetensors": True, **found}
        models = {
            name: _read_component(source, name, each, options)
            for name, each in index.items()
            if isinstance(each, list) and _is_model(each)
        }
        pipeline = library.DiffusionPipeline.from_pretrained(
            source.name, trust_remote_code=False, **options, **models
        )
    if unread := find_unsupported_setting(pipeline):
        raise refusal(source, unread)
    return pipeline


def load_unfilled(
    params: RunParams[DenoisingPolicyParams], *, data: Path, decoding: Denoising, run: DryRun
) -> DenoisingPolicy:
    """Returns the policy of the base for a dry run.

    Raises:
      ParameterError: If the base's configuration is not on this machine.
    """
    silence_diffusers()
    base, dtype = params.policy.base, DTYPES[params.machine.dtype]
    with torch.device("meta"):
        if isinstance(base, ScratchFlowBase):
            pipeline = make_fresh_pipeline(base, dtype, seed=params.seed)
        else:
            pipeline = _shape_pipeline(base, dtype, data)
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.eval().requires_grad_(module is pipeline.transformer)
            if module is pipeline.transformer:
                place_round(params, module, run)
            else:
                run.place(module)
    pipeline.set_progress_bar_config(disable=True)
    with run:
        return DenoisingPolicy(
            pipeline,
            decoding=decoding,
            canvas=params.policy.canvas,
            num_tokens=params.policy.caption_tokens,
        )


def _shape_pipeline(base: DirectoryBase | HubBase | S3Base, dtype: torch.dtype, data: Path) -> Any:
    """Returns the pipeline of a source's configurations, without weights.

    Raises:
      ParameterError: If a configuration is not on this machine, or cannot be loaded.
    """
    source = find_local_source(base, data, parameter="policy.base")
    found = {"revision": source.revision, "local_files_only": True}
    with refused_by_library(lambda why: refusal(source, why)):
        index = library.DiffusionPipeline.load_config(source.name, **found)
        models = {
            name: _shape_component(source.name, name, each, found).to(dtype)
            for name, each in index.items()
            if isinstance(each, list) and _is_model(each)
        }
        return library.DiffusionPipeline.from_pretrained(
            source.name, trust_remote_code=False, **found, **models
        )


def _shape_component(name: str, folder: str, component: list[Any], found: dict[str, Any]) -> Any:
    """Returns a component of a pipeline without weights."""
    kind = _class_of(component)
    if hasattr(kind, "load_config"):  # of diffusers
        return kind.from_config(kind.load_config(name, subfolder=folder, **found))
    return kind(kind.config_class.from_pretrained(name, subfolder=folder, **found))


def _is_model(component: list[Any]) -> bool:
    """Returns whether an entry [library, class] of a model index is a module with weights."""
    found = _class_of(component)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _class_of(component: list[Any]) -> Any:
    kind, name = component
    return getattr({"diffusers": library, "transformers": transformers}.get(kind), str(name), None)


def _read_component(
    source: Source, name: str, component: list[Any], options: Mapping[str, Any]
) -> nn.Module:
    """Returns a component of a pipeline.

    Raises:
      ParameterError: If weights are missing or unexpected; the library would initialize missing
        ones at random.
    """
    model, found = _class_of(component).from_pretrained(
        source.name, subfolder=name, output_loading_info=True, **options
    )
    if wrong := find_wrong_weights(found):
        raise refusal(source, f"the weights of {name} are not those of its config.json: {wrong}")
    loaded: nn.Module = model
    return loaded


def _match_flow(
    params: RunParams[DenoisingPolicyParams],
    warmup: FlowWarmup,
    pipeline: Any,
    table: pd.DataFrame,
) -> Iterator[WarmupUpdate]:
    """Trains a fresh pipeline on drawings for a table of schema WARMUP."""
    # Imported here: an imported base needs no drawings.
    from grpo.modalities.denoising.flow_matching import Drawings, match_flow

    policy, task = params.policy, params.task
    canvas = policy.canvas
    require_canvas(pipeline, canvas)
    _require_room(policy, warmup, pipeline, task, table["solution"].tolist())
    drawing = Drawing(canvas.height, canvas.width, warmup.font_size, warmup.character_width)
    texts, moved = table["solution"].tolist(), task.pixels_per_frame
    if moved is None:
        pixels = draw_texts(texts, drawing)
    else:
        pixels = draw_clips(texts, drawing, frames=canvas.frames, pixels_per_frame=moved)
    settings = warmup_settings(warmup, params.seed)
    updates = match_flow(
        pipeline,
        Drawings(captions=table["prompt"].tolist(), pixels=torch.from_numpy(pixels)),
        settings,
        num_tokens=policy.caption_tokens,
        blank_fraction=warmup.blank_fraction,
    )
    return with_remedy(updates, settings)


def _require_room(
    policy: DenoisingPolicyParams,
    warmup: FlowWarmup,
    pipeline: Any,
    task: Any,
    texts: list[str],
) -> None:
    """Raises ParameterError unless the longest text fits the text encoders and the canvas.

    Both would silently truncate a longer text.
    """
    longest = max(map(len, texts))
    tokens = longest + 2  # one byte per character, plus start and end token
    if task.pixels_per_frame is None:
        room, name = pipeline.tokenizer_max_length, "base.text_encoder.max_position_embeddings"
    else:
        room, name = policy.caption_tokens, "caption_tokens"
        longest = max(len(split_text(text)[0]) for text in texts)
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
