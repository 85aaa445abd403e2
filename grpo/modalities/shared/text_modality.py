"""What modalities share whose step is a token of an answer, drawn at a temperature.

Without torch, because flows read parameters.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from grpo.modalities.modality import (
    Modality,
    PolicyParams,
    TokenDraws,
    TokenSampling,
    find_temperature_mismatch,
)
from grpo.schema import Steps


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Sampling settings. They define the density, so log-probs use the same values (rule U25)."""

    temperature: float  # 0: greedy
    max_steps: int


class TextPolicyParams(PolicyParams):
    """The section `policy` of such a modality."""

    max_steps: Steps


TextPolicyT = TypeVar("TextPolicyT", bound=TextPolicyParams)


class TextModality(Modality[TextPolicyT, TokenSampling, TokenDraws]):
    """A modality that is evaluated greedily and at a temperature."""

    sampling = TokenSampling
    evaluation_sampling: type[TokenDraws] = TokenDraws
    output_kind = "text"

    def rule_facts(self, policy: TextPolicyT, sampling: TokenSampling) -> dict[str, Any]:
        return {"top_p": sampling.top_p}

    def step_limit(self, policy: TextPolicyT, sampling: TokenSampling) -> int:
        return policy.max_steps

    def round_draws(
        self, policy: TextPolicyT, sampling: TokenSampling, *, iterations_behind: int
    ) -> Decoding:
        return Decoding(temperature=sampling.first_temperature, max_steps=policy.max_steps)

    def evaluation_draws(self, policy: TextPolicyT, sampling: TokenDraws) -> dict[str, Decoding]:
        return {
            name: Decoding(temperature=temperature, max_steps=policy.max_steps)
            for name, temperature in (("greedy", 0.0), ("sampled", sampling.temperature))
        }

    def find_profile_mismatch(self, sampling: TokenSampling, profiled: TokenDraws) -> str | None:
        return find_temperature_mismatch(sampling, profiled)
