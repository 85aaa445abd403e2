"""Denoising policies from parameters: fresh and imported pipelines, and trained directories."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

from grpo.build.machine import DTYPES
from grpo.errors import MissingExtraError, ParameterError
from grpo.params import PARAMS, Parameters
from grpo.policies.denoising import DenoisingPolicy
from grpo.policies.kernels import Denoising
from grpo.policies.lora import add_lora
from grpo.policies.pipelines import Canvas, load_pipeline
from grpo.policies.storage import ADAPTER, read_trainable
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
        pipeline.transformer = add_lora(pipeline.transformer, settings.lora, seed=seed)
        if (directory / ADAPTER).exists():
            read_trainable(directory, pipeline.transformer, optimizer=None)
    pipeline.to(params.machine.device)
    return DenoisingPolicy(
        pipeline,
        decoding=decoding,
        canvas=Canvas(settings.canvas.height, settings.canvas.width),
        num_tokens=settings.caption_tokens,
    )


def quiet() -> None:
    """Turns diffusers' own bars and remarks off."""
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()


def make_caption_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes whose end token has the largest number.

    CLIP's pooled output is what stands at the end token, or at the largest number.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<bos>", *alphabet, "<eos>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        special_tokens=[(name, vocabulary[name]) for name in ("<bos>", "<eos>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


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
    is_local = isinstance(base, DirectoryBase)
    name = str(data / base.path) if isinstance(base, DirectoryBase) else base.id
    if is_local and not Path(name).is_dir():
        raise ParameterError(f"{PARAMS}: policy.base.path must be a directory, {name} is none")
    from_pretrained: Any = library.DiffusionPipeline.from_pretrained
    try:
        return from_pretrained(
            name,
            revision=None if isinstance(base, DirectoryBase) else base.revision,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=is_local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParameterError(f"{PARAMS}: policy.base {name!r} cannot be loaded: {reason}") from None
