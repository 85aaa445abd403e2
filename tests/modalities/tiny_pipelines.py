"""Pipelines of the components that recipes load, shrunken: text encoders, VAE and schedulers."""

from typing import Any

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from grpo.modalities.denoising.modality import Canvas
from grpo.modalities.denoising.pipelines import library
from grpo.modalities.shared.tokenizers import make_caption_tokenizer

IMAGE = Canvas(frames=1, height=16, width=16)
CLIP = Canvas(frames=5, height=16, width=16)
WAN_SCHEDULER = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


def tiny_sd3(**components: Any) -> Any:
    """Returns a Stable Diffusion 3 with both CLIPs, T5 and an autoencoder, random weights."""
    torch.manual_seed(0)
    first, second = _clip("quick_gelu"), _clip("gelu")
    tokenizer = make_caption_tokenizer()
    tokenizer.model_max_length = 16
    tokens = {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    t5 = T5EncoderModel(T5Config(d_model=64, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **tokens))
    given = {
        "transformer": library.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_projection_dim=32,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        "scheduler": library.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": library.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "text_encoder": first,
        "tokenizer": tokenizer,
        "text_encoder_2": second,
        "tokenizer_2": tokenizer,
        "text_encoder_3": t5,
        "tokenizer_3": tokenizer,
        **components,
    }
    return _without_dropout(library.StableDiffusion3Pipeline(**given))


def tiny_wan(**components: Any) -> Any:
    """Returns a Wan with UMT5, its own autoencoder and UniPC's flow sigmas, random weights."""
    torch.manual_seed(0)
    tokenizer = make_caption_tokenizer()
    tokens = {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    given = {
        "transformer": tiny_wan_transformer(),
        "scheduler": library.UniPCMultistepScheduler(**WAN_SCHEDULER),
        "vae": library.AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
            scale_factor_temporal=2,
            scale_factor_spatial=2,
        ),
        "text_encoder": UMT5EncoderModel(
            UMT5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **tokens)
        ),
        "tokenizer": tokenizer,
        **components,
    }
    return _without_dropout(library.WanPipeline(**given))


def tiny_wan_transformer(**settings: Any) -> Any:
    """Returns a transformer of two blocks."""
    shape = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
    }
    return library.WanTransformer3DModel(**{**shape, **settings})


def _without_dropout(pipeline: Any) -> Any:
    for each in pipeline.components.values():
        if isinstance(each, torch.nn.Module):
            each.eval()
    return pipeline


def _clip(activation: str) -> CLIPTextModelWithProjection:
    tokenizer = make_caption_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=16,
        hidden_act=activation,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    # CLIP's own deviation hardly tells captions apart at this size.
    for each in encoder.get_input_embeddings(), encoder.text_model.embeddings.position_embedding:
        torch.nn.init.normal_(each.weight, std=0.5)
    return encoder
