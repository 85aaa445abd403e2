"""Base models of encoder-decoder policies: fresh, or from a directory, the hub or S3."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from grpo.errors import ArtifactError, brief, located
from grpo.modalities.modality import RunParams
from grpo.modalities.seq2seq.forward import EncoderDecoderPasses
from grpo.modalities.seq2seq.modality import ScratchBase, Seq2SeqPolicyParams
from grpo.modalities.seq2seq.policy import Seq2SeqPolicy, start_token
from grpo.modalities.shared.models import (
    make_fresh_model,
    read_model,
    read_tokenizer,
    require_embedded,
    shape_model,
)
from grpo.modalities.shared.restoring import place_round
from grpo.modalities.shared.text_modality import Decoding
from grpo.modalities.shared.texts import PASS_ERRORS, TOLERANCES, base_of_texts
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.shared.warmup import (
    BasePolicy,
    WarmupSettings,
    WarmupUpdate,
    fit,
    warmup_settings,
)
from grpo.runtime.dry_run import DryRun
from grpo.runtime.machine import DTYPES
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.types import Cost

BASE = "policy.base"
PROBES = ["one", "another, longer"]  # of unequal lengths
PROBE_STEPS = 4
IGNORED = -100


def make_base_policy(params: RunParams[Seq2SeqPolicyParams], data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
      ArtifactError: If the model cannot be sampled.
    """
    model, tokenizer = make_base(params, data)
    nn.Module.to(model, params.machine.device)
    with located(f"{PARAMS}: {BASE}"):
        require_sampling(model, tokenizer)
    fresh = params.policy.base
    settings = (
        warmup_settings(fresh.warmup, params.seed) if isinstance(fresh, ScratchBase) else None
    )
    return base_of_texts(model, tokenizer, settings, warm_up)


def make_base(params: RunParams[Seq2SeqPolicyParams], data: Path) -> tuple[PreTrainedModel, Any]:
    """Returns the base model, before any warm-up, and its tokenizer.

    Raises:
      ParameterError: If the source does not exist or the class refuses its configuration.
    """
    base = params.policy.base
    dtype = DTYPES[params.machine.dtype]
    if isinstance(base, ScratchBase):
        torch.manual_seed(derive_seed(params.seed, "base"))
        return _make_fresh(base, dtype)
    model = read_model(AutoModelForSeq2SeqLM, base, data, parameter=BASE, dtype=dtype).eval()
    tokenizer = read_tokenizer(base, data, parameter=BASE)
    require_embedded(model, tokenizer, parameter=BASE)
    return model, tokenizer


def load_unfilled(
    params: RunParams[Seq2SeqPolicyParams], *, data: Path, decoding: Decoding, run: DryRun
) -> Seq2SeqPolicy:
    """Returns the policy of the base for a dry run.

    Raises:
      ParameterError: If the base's configuration is not on this machine.
    """
    base, dtype = params.policy.base, DTYPES[params.machine.dtype]
    with torch.device("meta"):
        if isinstance(base, ScratchBase):
            model, tokenizer = _make_fresh(base, dtype)
        else:
            model = shape_model(AutoModelForSeq2SeqLM, base, data, parameter=BASE).to(dtype)
            tokenizer = read_tokenizer(base, data, parameter=BASE)
    place_round(params, model, run)
    if params.policy.source_language is not None:
        tokenizer.src_lang = params.policy.source_language
    with run:
        forces_tag = params.policy.forces_tag
        return Seq2SeqPolicy(model, tokenizer, decoding=decoding, forces_tag=forces_tag)


def _make_fresh(base: ScratchBase, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Returns a fresh model of a transformers class."""
    tokenizer = make_byte_tokenizer()
    marks = ("pad_token_id", "bos_token_id", "eos_token_id")
    known = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in marks}}
    fresh = make_fresh_model(
        base.architecture,
        base.config,
        {**known, "decoder_start_token_id": tokenizer.bos_token_id},
        ending="",
        what="an encoder-decoder class of transformers such as M2M100ForConditionalGeneration",
        parameter=BASE,
    )
    return fresh.to(dtype).eval(), tokenizer


def require_sampling(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raises ArtifactError unless cached decoding gives the log-probs of a full pass.

    A model can fail if it has its own cache type, ignores padding or takes other inputs.
    """
    what = f"{type(model).__name__} cannot be sampled as an encoder-decoder"
    try:
        policy = Seq2SeqPolicy(
            model,
            tokenizer,
            decoding=Decoding(temperature=1.0, max_steps=PROBE_STEPS),
            forces_tag=False,
        )
        generator = torch.Generator().manual_seed(0)
        trajectory, sampled = policy.sample(PROBES, group_sizes=[2, 1], generator=generator)
        with torch.no_grad():
            worst = float((policy.log_prob(trajectory).cpu() - sampled).abs().max())
    except PASS_ERRORS as error:
        raise ArtifactError(f"{what}, {brief(error)}; choose another model") from None
    if not worst < TOLERANCES[model.dtype]:
        raise ArtifactError(
            f"{what}: log-probs of sampling must equal those of one pass, got a difference of "
            f"{worst:.2g} nats; choose another model"
        )


def warm_up(
    model: PreTrainedModel,
    tokenizer: Any,
    pairs: list[tuple[str, str]],
    settings: WarmupSettings,
) -> Iterator[WarmupUpdate]:
    """Trains on (source, target) pairs with cross-entropy on target and end token.

    Raises:
      DivergedError: If a number is not finite or the final loss is far above the initial one.
    """
    counts = EncoderDecoderPasses(model).training_counts
    sources = tokenizer([source for source, _ in pairs])["input_ids"]
    targets = tokenizer([target for _, target in pairs], add_special_tokens=False)["input_ids"]
    end, start = tokenizer.eos_token_id, start_token(model)

    def prepare(rows: list[int]) -> tuple[Callable[[], Tensor], Cost]:
        asked = _pad([sources[row] for row in rows], tokenizer.pad_token_id)
        wanted = _pad([[*targets[row], end] for row in rows], IGNORED)
        read = torch.cat([torch.full((len(rows), 1), start), wanted[:, :-1]], dim=1)
        read[read == IGNORED] = tokenizer.pad_token_id
        attended = _pad([[1] * len(sources[row]) for row in rows], 0)
        count, new = read.shape
        flops = counts.encode(count, asked.shape[1]) + counts.decode(
            count, new, seen=new, width=asked.shape[1], logits=new, reads_source=True
        )

        def loss() -> Tensor:
            logits = model(
                input_ids=asked.to(model.device),
                attention_mask=attended.to(model.device),
                decoder_input_ids=read.to(model.device),
                use_cache=False,
            ).logits
            return cross_entropy(
                logits.flatten(0, 1).float(),
                wanted.to(model.device).flatten(),
                ignore_index=IGNORED,
            )

        return loss, Cost(flops=flops, trained_steps=int((wanted != IGNORED).sum()))

    yield from fit(model, len(pairs), settings, prepare)


def _pad(rows: list[list[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
