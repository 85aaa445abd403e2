"""How a chunked policy draws; apart from the policy, whose imports take seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChunkDecoding:
    """How a policy draws: part of its density, so log-probs use the same numbers (rule U25)."""

    temperature: float  # 0: greedy
    max_steps: int  # chunks
