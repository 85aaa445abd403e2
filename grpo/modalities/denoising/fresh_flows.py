"""Fresh pipelines of `diffusers` classes that draw pixels, with text encoders of their own."""

from math import prod
from typing import Any

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, UMT5Config, UMT5EncoderModel

from grpo.errors import ParameterError, refused_by_library
from grpo.modalities.denoising.parameters import ScratchFlowBase
from grpo.modalities.denoising.pipelines import library
from grpo.modalities.shared.models import require_known_keys
from grpo.modalities.shared.tokenizers import make_caption_tokenizer
from grpo.schema import PARAMS


def make_fresh_pipeline(base: ScratchFlowBase, dtype: torch.dtype, *, seed: int) -> Any:
    """Returns a pipeline without an autoencoder: its states are pixels.

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
    """Returns a Stable Diffusion 3 with two CLIP encoders and no T5."""
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
    """Returns a Wan with a UMT5 encoder.

    Its patches are embedded, and read out, by an orthogonal map: nothing of what they hold is lost
    to chance. Wan knows relative positions alone, so a patch that holds a whole clip is what lets a
    small model tell the first frame from the last.
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
    """Returns a text encoder's configuration for the tokens of captions."""
    require_known_keys(kind, base.text_encoder, parameter="policy.base.text_encoder")
    tokenizer = make_caption_tokenizer()
    known = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", *marks)}
    return kind(**base.text_encoder, vocab_size=len(tokenizer), **known)
