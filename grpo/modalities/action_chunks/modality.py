"""The modality of action chunks: its parameters and its implementation of `Modality`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from grpo.modalities.modality import (
    Lora,
    Modality,
    PolicyParams,
    RunParams,
    TokenDraws,
    TokenSampling,
    find_temperature_mismatch,
)
from grpo.schema import (
    DirectoryBase,
    HubBase,
    Name,
    NonNegative,
    Pixels,
    Positive,
    Rate,
    S3Base,
    Steps,
    Strict,
)

if TYPE_CHECKING:
    import pandas as pd
    from torch import Generator, Tensor

    from grpo.modalities.action_chunks.phase_metrics import PhaseMetrics
    from grpo.modalities.action_chunks.policy import ActionChunkPolicy
    from grpo.modalities.action_chunks.trajectories import ChunkTrajectory
    from grpo.modalities.policy import Policy
    from grpo.modalities.shared.exhibits import Film, Phase
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.runtime.artifacts.stored_iterations import IterationFiles
    from grpo.runtime.dry_run import DryRun
    from grpo.types import Rollouts


class ScratchBackbone(Strict):
    """A fresh model of a `transformers` class without a head."""

    source: Literal["scratch"]
    architecture: str  # e.g. LlamaModel
    config: dict[str, int | float | str | bool]


Headless = Annotated[
    ScratchBackbone | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]
# Colors per labeller: the gripper's from Okabe and Ito (2008), time from dark to light.
PHASE_COLORS = {
    "gripper": ("#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#8c959f"),
    "time": ("#5b4fa8", "#3f7fb8", "#2fa39a", "#7cc25b", "#e5c72e"),
}
LONGEST_ROLLOUT = 500  # simulator steps; Meta-World raises after that


@dataclass(frozen=True, kw_only=True)
class ChunkDecoding:
    """Sampling settings. They define the density, so log-probs use the same values (rule U25)."""

    temperature: float  # 0: greedy
    max_steps: int  # chunks


class Cloning(Strict):
    """Behavior cloning of scripted experts, to partial skill."""

    demonstrations: dict[Name, Positive] = Field(min_length=1)  # count for each family of the task
    noise: NonNegative  # deviation of noise on the expert's executed actions, in action units
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    bin_spread: NonNegative  # deviation of the target distribution, in bins; 0: one-hot
    observation_noise: NonNegative  # in the observation's own units


class ChunkParams(Strict):
    """Shape of an action chunk, which is decoded in one forward pass."""

    length: Positive  # actions
    bins: Annotated[int, Field(ge=2, le=65536)]  # discrete values of an action dimension
    positions: Positive  # backbone positions that decode a chunk


class Vision(Strict):
    """A vision encoder of `transformers` and the size of its input pictures."""

    encoder: Headless  # e.g. SiglipVisionModel; a fresh one's config without image_size
    pixels: Pixels  # side length of a square picture


class ChunkBase(Strict):
    """A backbone of `transformers`, with fresh projections for states, pictures and actions."""

    backbone: Headless
    # Observed state: all numbers, or the hand's position and opening.
    state: Literal["full", "hand"]
    vision: Vision | None  # None: the policy observes the state alone
    chunk: ChunkParams
    warmup: Cloning


class Scenes(Strict):
    """Parallel scenes of the simulator.

    The number of processes follows the machine's cores and does not change results.
    """

    # Each scene holds a simulator model in memory; one forward pass covers all scenes.
    at_once: Annotated[int, Field(gt=0, le=4096)]
    # Limit for one chunk of one scene. Too short a limit fails on a busy machine.
    timeout_seconds: Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]


class ActionChunkPolicyParams(PolicyParams):
    """A robot policy whose step is a chunk of actions."""

    kind: Literal["action_chunks"]
    base: ChunkBase
    lora: Lora | None  # adapters on the backbone
    recompute: bool  # gradient checkpointing of the blocks: less memory, more time
    phases: Literal["gripper", "time"]  # labeller of chunks
    scenes: Scenes
    max_steps: Steps  # chunks

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        parts = {"backbone": self.base.backbone}
        if self.base.vision:
            parts["vision.encoder"] = self.base.vision.encoder
        return {
            f"policy.base.{name}.config": each.config
            for name, each in parts.items()
            if isinstance(each, ScratchBackbone)
        }


class ActionChunks(Modality[ActionChunkPolicyParams, TokenSampling, TokenDraws]):
    """Policies in a robot simulator whose step is a chunk of actions."""

    kind = "action_chunks"
    policy = ActionChunkPolicyParams
    sampling = TokenSampling
    evaluation_sampling = TokenDraws
    prompt_kind = "scene"
    output_kind = "simulation"
    step_name = "chunk"

    def find_conflicts(
        self, params: RunParams[ActionChunkPolicyParams], judge: str
    ) -> Iterator[str]:
        """Yields errors in chunk sizes, rollout length and demonstrated families."""
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
        yield from super().find_conflicts(params, judge)

    def phases(self, policy: ActionChunkPolicyParams) -> "tuple[Phase, ...]":
        return phases_of(policy)

    def measure_phases(
        self,
        policy: "Policy[Any]",
        trajectory: "ChunkTrajectory",
        rollouts: "Rollouts",
        names: Sequence[str],
        generator: "Generator",
    ) -> dict[str, object]:
        """Returns the gradient deviation and outcome contrast of each phase."""
        from grpo.modalities.action_chunks.phase_metrics import profile_phases

        return profile_phases(policy, trajectory, rollouts, names, generator)

    def describe_phases(
        self,
        rollouts: "Rollouts",
        trained: "Tensor",
        state: dict[str, dict[str, float]],
        names: Sequence[str],
    ) -> "list[PhaseMetrics]":
        from grpo.modalities.action_chunks.phase_metrics import phase_metrics

        return phase_metrics(rollouts, trained, state, names)

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[ActionChunkPolicyParams],
        files: "IterationFiles",
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
        *,
        has_media: bool,
    ) -> "Sequence[Film | None]":
        """Returns films of rollouts replayed in the simulator."""
        from grpo.modalities.action_chunks.films import read_films

        return read_films(artifacts, params, files, rollouts, chosen)

    def rule_facts(
        self, policy: ActionChunkPolicyParams, sampling: TokenSampling
    ) -> dict[str, Any]:
        return {"top_p": sampling.top_p, "acts": True}

    def make_base(self, params: RunParams[ActionChunkPolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.action_chunks.bases import make_base_policy

        return make_base_policy(params, data)

    def step_limit(self, policy: ActionChunkPolicyParams, sampling: TokenSampling) -> int:
        return policy.max_steps

    def round_draws(
        self, policy: ActionChunkPolicyParams, sampling: TokenSampling, *, iterations_behind: int
    ) -> ChunkDecoding:
        return ChunkDecoding(temperature=sampling.first_temperature, max_steps=policy.max_steps)

    def evaluation_draws(
        self, policy: ActionChunkPolicyParams, sampling: TokenDraws
    ) -> dict[str, ChunkDecoding]:
        temperatures = {"greedy": 0.0, "sampled": sampling.temperature}
        return {
            name: ChunkDecoding(temperature=each, max_steps=policy.max_steps)
            for name, each in temperatures.items()
        }

    def find_profile_mismatch(self, sampling: TokenSampling, profiled: TokenDraws) -> str | None:
        return find_temperature_mismatch(sampling, profiled)

    def load_policy(
        self,
        params: RunParams[ActionChunkPolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: ChunkDecoding,
        policies_per_host: int = 1,
    ) -> "ActionChunkPolicy":
        from grpo.modalities.action_chunks.policy import load_chunk_policy

        return load_chunk_policy(
            params,
            base=base,
            directory=directory,
            decoding=draws,
            policies_per_host=policies_per_host,
        )

    def rehearsed_prompts(self, params: RunParams[ActionChunkPolicyParams]) -> list[str]:
        """Returns the instructions of the families: drawing scenes takes the simulator."""
        from grpo.modalities.action_chunks.simulation.sizes import instruction_of

        return [instruction_of(each) for each in params.task.families]

    def load_unfilled(
        self,
        params: RunParams[ActionChunkPolicyParams],
        *,
        data: Path,
        draws: ChunkDecoding,
        run: "DryRun",
    ) -> "ActionChunkPolicy":
        from grpo.modalities.action_chunks.bases import load_unfilled

        return load_unfilled(params, data=data, decoding=draws, run=run)

    def layout(self, policy: ActionChunkPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.action_chunks.trajectories import LAYOUT

        return LAYOUT


def phases_of(policy: ActionChunkPolicyParams) -> "tuple[Phase, ...]":
    """Returns the phases of the labeller with their colors."""
    # Imported here: this imports torch, which `grpo check` does not need.
    from grpo.modalities.action_chunks.phases import PHASE_NAMES
    from grpo.modalities.shared.exhibits import Phase

    named = zip(PHASE_NAMES[policy.phases], PHASE_COLORS[policy.phases], strict=True)
    return tuple(Phase(name=name, color=color) for name, color in named)
