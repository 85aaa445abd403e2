"""The modality of action chunks, as the core knows it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.modalities.action_chunks.decoding import ChunkDecoding
from grpo.modalities.action_chunks.parameters import ActionChunkPolicyParams
from grpo.modalities.modality import Modality, RunParams
from grpo.modalities.shared.parameters import TokenDraws, TokenSampling, find_other_temperature

if TYPE_CHECKING:
    from grpo.modalities.action_chunks.policy import ActionChunkPolicy
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy

LONGEST_ROLLOUT = 500  # steps of the simulator, after which Meta-World refuses to go on


class ActionChunks(Modality[ActionChunkPolicyParams, TokenSampling, TokenDraws]):
    """Policies in a robot simulator, whose step is a chunk of actions."""

    kind = "action_chunks"
    policy = ActionChunkPolicyParams
    sampling = TokenSampling
    evaluation_sampling = TokenDraws
    tasks = ("manipulation",)
    judged = "simulation"
    step_name = "chunk"

    def find_wrong(self, params: RunParams[ActionChunkPolicyParams], judge: str) -> Iterator[str]:
        """Yields how chunks do not divide, and families that are not demonstrated."""
        policy, families = params.policy, params.task.families
        chunk, shown = policy.base.chunk, sorted(policy.base.warmup.demonstrations)
        if chunk.length % chunk.positions != 0:
            yield (
                f"policy.base.chunk.positions must divide chunk.length {chunk.length}, "
                f"got {chunk.positions}"
            )
        if policy.max_steps * chunk.length > LONGEST_ROLLOUT:
            yield (
                f"policy.max_steps times chunk.length must be at most {LONGEST_ROLLOUT}, "
                f"got {policy.max_steps * chunk.length}"
            )
        if shown != sorted(set(families)):
            yield (
                "policy.base.warmup.demonstrations must name the families of the task, "
                f"{sorted(families)}, got {shown}"
            )
        yield from super().find_wrong(params, judge)

    def phase_names(self, policy: ActionChunkPolicyParams) -> tuple[str, ...]:
        from grpo.modalities.action_chunks.phases import PHASE_NAMES

        return tuple(PHASE_NAMES[policy.phases])

    def rule_facts(
        self, policy: ActionChunkPolicyParams, sampling: TokenSampling
    ) -> dict[str, Any]:
        return {"top_p": sampling.top_p, "acts": True}

    def make_base(self, params: RunParams[ActionChunkPolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.action_chunks.bases import make_base_policy

        return make_base_policy(params, data)

    def round_draws(
        self, policy: ActionChunkPolicyParams, sampling: TokenSampling, *, rounds_behind: int
    ) -> ChunkDecoding:
        return ChunkDecoding(temperature=sampling.temperature, max_steps=policy.max_steps)

    def evaluation_draws(
        self, policy: ActionChunkPolicyParams, sampling: TokenDraws
    ) -> dict[str, ChunkDecoding]:
        temperatures = {"greedy": 0.0, "sampled": sampling.temperature}
        return {
            name: ChunkDecoding(temperature=each, max_steps=policy.max_steps)
            for name, each in temperatures.items()
        }

    def find_unlike_profile(self, sampling: TokenSampling, profiled: TokenDraws) -> str | None:
        return find_other_temperature(sampling, profiled)

    def load_policy(
        self,
        params: RunParams[ActionChunkPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: ChunkDecoding,
        sharing: int = 1,
    ) -> "ActionChunkPolicy":
        from grpo.modalities.action_chunks.loading import load_chunk_policy

        return load_chunk_policy(
            params, base=base, directory=directory, decoding=draws, sharing=sharing
        )

    def layout(self, policy: ActionChunkPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.action_chunks.trajectories import LAYOUT

        return LAYOUT
