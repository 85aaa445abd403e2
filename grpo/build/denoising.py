"""Denoising policies from parameters: fresh and imported pipelines, and trained directories."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from grpo.build.machine import DTYPES
from grpo.build.sources import find_source, refusal
from grpo.build.tokenizers import make_caption_tokenizer
from grpo.errors import MissingExtraError, ParameterError
from grpo.params import PARAMS, Parameters
from grpo.policies.denoising import DenoisingPolicy
from grpo.policies.kernels import Denoising
from grpo.policies.lora import load_lora
from grpo.policies.pipelines import load_pipeline
from grpo.policy_params import DirectoryBase, HubBase, ScratchFlowBase
from grpo.seeds import derive_seed

try:
    import diffusers
except ImportError:
    raise MissingExtraError(
        "params.yaml: policy.kind denoising needs diffusers; run pip install -e '.[denoising]'"
    ) from None

library: Any = diffusers  # it is not typed


def make_pipeline(params: Parameters, data: Path) -> Any:
    """Returns the base pipeline, before any warm-up.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
    """
    quiet()
    base = params.denoising.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchFlowBase):
        return _from_scratch(base, dtype, derive_seed(params.seed, "base"))
    return _from_pretrained(base, dtype, data)


def load_denoising_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: Denoising
) -> DenoisingPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    quiet()
    settings = params.denoising
    pipeline = load_pipeline(base if settings.lora else directory, DTYPES[params.machine.dtype])
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        pipeline.transformer = load_lora(pipeline.transformer, settings.lora, directory, seed=seed)
    pipeline.to(params.machine.device)
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=settings.canvas,
        num_tokens=settings.caption_tokens,
    )


def quiet() -> None:
    """Turns diffusers' own bars and remarks off."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()


def _from_scratch(base: ScratchFlowBase, dtype: torch.dtype, seed: int) -> Any:
    """Returns a fresh Stable Diffusion 3 on pixels, with two CLIP encoders and no T5."""
    torch.manual_seed(seed)
    try:
        encoders = [_text_encoder(base) for _ in range(2)]
        widths: list[Any] = [each.config for each in encoders]
        transformer = library.SD3Transformer2DModel(
            **base.transformer,
            joint_attention_dim=sum(each.hidden_size for each in widths),
            pooled_projection_dim=sum(each.projection_dim for each in widths),
        )
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ParameterError(f"{PARAMS}: policy.base is refused: {reason}") from None
    tokenizer = make_caption_tokenizer()
    tokenizer.model_max_length = encoders[0].config.max_position_embeddings
    pipeline = library.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=library.FlowMatchEulerDiscreteScheduler(shift=base.shift),
        vae=None,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            module.to(dtype).eval()
    return pipeline


def _text_encoder(base: ScratchFlowBase) -> CLIPTextModelWithProjection:
    tokenizer = make_caption_tokenizer()
    settings: dict[str, Any] = dict(base.text_encoder)
    config = CLIPTextConfig(
        **settings,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    embeddings = encoder.text_model.embeddings
    for each in (embeddings.token_embedding, embeddings.position_embedding):
        nn.init.normal_(each.weight, std=base.embedding_std)
    return encoder


def _from_pretrained(base: DirectoryBase | HubBase, dtype: torch.dtype, data: Path) -> Any:
    """Returns a pipeline from a directory under data/, or from the hub."""
    source = find_source(base, data, parameter="policy.base")
    from_pretrained: Any = library.DiffusionPipeline.from_pretrained
    try:
        return from_pretrained(
            source.name,
            revision=source.revision,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=source.is_local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise refusal(source, error) from None
