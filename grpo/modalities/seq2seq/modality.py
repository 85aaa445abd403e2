"""The modality of encoder-decoders: its parameters and its implementation of `Modality`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from grpo.modalities.modality import (
    PairWarmup,
    RunParams,
    TextWarmup,
    TokenDraws,
)
from grpo.modalities.shared.text_modality import Decoding, TextModality, TextPolicyParams
from grpo.schema import DirectoryBase, HubBase, Positive, S3Base, Strict

if TYPE_CHECKING:
    from grpo.modalities.seq2seq.policy import Seq2SeqPolicy
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.runtime.dry_run import DryRun


def _kind_of_warmup(value: Any) -> str:
    is_mix = isinstance(value, TextWarmup) or (isinstance(value, dict) and "answer_mark" in value)
    return "solutions" if is_mix else "pairs"


# Which of the two is needed depends on the task.
Warmup = Annotated[
    Annotated[TextWarmup, Tag("solutions")] | Annotated[PairWarmup, Tag("pairs")],
    Discriminator(_kind_of_warmup),
]


class ScratchBase(Strict):
    """A fresh model of a `transformers` class with a byte tokenizer and a warm-up."""

    source: Literal["scratch"]
    architecture: (
        str  # an encoder-decoder class of transformers, e.g. M2M100ForConditionalGeneration
    )
    config: dict[str, int | float | str | bool]
    warmup: Warmup


Base = Annotated[ScratchBase | DirectoryBase | HubBase | S3Base, Field(discriminator="source")]


class Seq2SeqPolicyParams(TextPolicyParams):
    """An encoder-decoder model."""

    kind: Literal["seq2seq"]
    base: Base
    source_language: str | None  # of tokenizers that need one, as eng_Latn of NLLB
    # Whether the tag of a prompt, ">>de<< text", is the token that the decoder is forced to begin
    # with (M2M100, NLLB); false: it is part of the source text (Marian, T5, fresh models).
    forces_tag: bool

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        return {"policy.base.config": base.config} if isinstance(base, ScratchBase) else {}


class Seq2SeqDraws(TokenDraws):
    """Sampling parameters of evaluation and profile."""

    beams: Positive  # of a beam search in evaluation, beside greedy decoding; 1: none


@dataclass(frozen=True, kw_only=True)
class BeamSearch(Decoding):
    """Settings of a beam search, which has no density."""

    beams: int


class Seq2Seq(TextModality[Seq2SeqPolicyParams]):
    """Encoder-decoder models of transformers; a step is a target token."""

    kind = "seq2seq"
    policy = Seq2SeqPolicyParams
    evaluation_sampling = Seq2SeqDraws
    prompt_kind = "text"
    step_name = "target token"
    has_library_format = True

    def evaluation_draws(
        self, policy: Seq2SeqPolicyParams, sampling: TokenDraws
    ) -> dict[str, Decoding]:
        assert isinstance(sampling, Seq2SeqDraws)  # `evaluation_sampling`
        draws = super().evaluation_draws(policy, sampling)
        if sampling.beams == 1:
            return draws
        search = BeamSearch(temperature=0.0, max_steps=policy.max_steps, beams=sampling.beams)
        return {**draws, "beam": search}

    def make_base(self, params: RunParams[Seq2SeqPolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.seq2seq.bases import make_base_policy

        return make_base_policy(params, data)

    def load_policy(
        self,
        params: RunParams[Seq2SeqPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: Decoding,
        policies_per_host: int = 1,
    ) -> "Seq2SeqPolicy":
        from grpo.modalities.seq2seq.policy import load_seq2seq_policy

        return load_seq2seq_policy(params, base=base, directory=directory, decoding=draws)

    def load_unfilled(
        self, params: RunParams[Seq2SeqPolicyParams], *, data: Path, draws: Decoding, run: "DryRun"
    ) -> "Seq2SeqPolicy":
        from grpo.modalities.seq2seq.bases import load_unfilled

        return load_unfilled(params, data=data, decoding=draws, run=run)

    def layout(self, policy: Seq2SeqPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.seq2seq.policy import LAYOUT

        return LAYOUT
