"""Parameters that several modalities have: adapters, a fresh backbone, draws of tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo.schema import NonNegative, Positive, Rate, Strict


class Lora(Strict):
    """Low-rank adapters, trained instead of the base's weights."""

    rank: Annotated[int, Field(gt=0, le=65536)]  # no model is wider
    alpha: Positive
    dropout: NonNegative
    target_modules: list[str] = Field(min_length=1)


class ScratchBackbone(Strict):
    """A fresh model of a `transformers` class without a head, told words."""

    source: Literal["scratch"]
    architecture: str  # e.g. LlamaModel
    config: dict[str, int | float | str | bool]


class SamplingParams(Strict):
    """How an arm draws rollouts; each modality has its own."""

    rollouts_per_batch: Positive  # what is sampled, and saved for a resume, at once


class TokenSampling(SamplingParams):
    """How rollouts are drawn; log-probs use the same temperature."""

    temperature: Rate
    top_p: Annotated[float, Field(gt=0, le=1)]


class TokenDraws(Strict):
    """How evaluation and profile draw."""

    temperature: Rate


class PolicyParams(Strict):
    """The section `policy`; each modality has its own."""

    kind: str
    base: Strict
    lora: Lora | None
    recompute: bool  # blocks compute activations again in the backward pass: memory for time

    @property
    def warmup(self) -> Any:
        """The warm-up of a fresh base; None if the base is imported."""
        return getattr(self.base, "warmup", None)

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the configurations of models that are made here, by their parameter path."""
        return {}


def find_other_temperature(sampling: TokenSampling, profiled: TokenDraws) -> str | None:
    """Returns how the temperatures of an arm and of the profile differ; None if they do not."""
    if sampling.temperature == profiled.temperature:
        return None
    return (
        "sampling.temperature must equal evaluation.sampling.temperature, at which the profile "
        f"samples, for reuse_profile_rollouts, got {sampling.temperature} and "
        f"{profiled.temperature}"
    )
