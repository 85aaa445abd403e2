"""The modality of action chunks: its parameters, and what the core may ask of it."""

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
    ScratchBackbone,
    TokenDraws,
    TokenSampling,
    find_other_temperature,
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
    from grpo.modalities.base import Policy
    from grpo.modalities.shared.exhibits import Film, Phase
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.types import Rollouts

Headless = Annotated[
    ScratchBackbone | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]
# By labeller: what the gripper does in colors of Okabe and Ito (2008), time from dark to light.
PHASE_COLORS = {
    "gripper": ("#56b4e9", "#e69f00", "#d55e00", "#cc79a7", "#8c959f"),
    "time": ("#5b4fa8", "#3f7fb8", "#2fa39a", "#7cc25b", "#e5c72e"),
}
LONGEST_ROLLOUT = 500  # steps of the simulator, after which Meta-World refuses to go on


@dataclass(frozen=True, kw_only=True)
class ChunkDecoding:
    """How a policy draws: part of its density, so log-probs use the same numbers (rule U25)."""

    temperature: float  # 0: greedy
    max_steps: int  # chunks


class Cloning(Strict):
    """Behavior cloning of scripted experts, to partial skill."""

    demonstrations: dict[Name, Positive] = Field(min_length=1)  # of every family of the task
    noise: NonNegative  # that shakes the expert's hand, in units of an action
    updates: Positive
    rows_per_update: Positive
    learning_rate: Rate
    bin_spread: NonNegative  # deviation of a target around its bin, in bins; 0: that bin alone
    observation_noise: NonNegative  # in the observation's own units


class ChunkParams(Strict):
    """What is decoded at once."""

    length: Positive  # actions
    bins: Annotated[int, Field(ge=2, le=65536)]  # values of an action's dimension
    positions: Positive  # of the backbone that decode a chunk


class Eyes(Strict):
    """A vision encoder of `transformers`, and the pictures that it is shown."""

    encoder: Headless  # a fresh one's class and config without image_size, e.g. SiglipVisionModel
    pixels: Pixels  # of a side


class ChunkBase(Strict):
    """A backbone of `transformers`, with fresh projections for states, pictures and actions."""

    backbone: Headless
    state: Literal["full", "hand"]  # what is seen: all numbers, or where the hand is and how open
    eyes: Eyes | None  # None: it sees the state alone
    chunk: ChunkParams
    warmup: Cloning


class Scenes(Strict):
    """How a simulator is played; processes are as many as the machine gives, and change nothing."""

    # Each holds a model of the simulator in memory; they are seen in one forward pass.
    at_once: Annotated[int, Field(gt=0, le=4096)]
    # For one chunk of one scene: a shorter one fails on a busy machine, a longer one never ends.
    timeout_seconds: Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]


class ActionChunkPolicyParams(PolicyParams):
    """A robot's policy whose step is a chunk of actions."""

    kind: Literal["action_chunks"]
    base: ChunkBase
    lora: Lora | None  # on the backbone
    recompute: bool  # blocks compute activations again in the backward pass: memory for time
    phases: Literal["gripper", "time"]  # how chunks are labeled
    scenes: Scenes
    max_steps: Steps  # chunks

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        parts = {"backbone": self.base.backbone}
        if self.base.eyes:
            parts["eyes.encoder"] = self.base.eyes.encoder
        return {
            f"policy.base.{name}.config": each.config
            for name, each in parts.items()
            if isinstance(each, ScratchBackbone)
        }


class ActionChunks(Modality[ActionChunkPolicyParams, TokenSampling, TokenDraws]):
    """Policies in a robot simulator, whose step is a chunk of actions."""

    kind = "action_chunks"
    policy = ActionChunkPolicyParams
    sampling = TokenSampling
    evaluation_sampling = TokenDraws
    asked = "scene"
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
        """Returns where in the task the signal is, measured by gradients."""
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
        name: str,
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
    ) -> "Sequence[Film | None]":
        """Returns films: rollouts played again in the simulator."""
        from grpo.modalities.action_chunks.films import read_films

        return read_films(artifacts, params, name, rollouts, chosen)

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
        from grpo.modalities.action_chunks.policy import load_chunk_policy

        return load_chunk_policy(
            params, base=base, directory=directory, decoding=draws, sharing=sharing
        )

    def layout(self, policy: ActionChunkPolicyParams, base: Path) -> "Layout":
        from grpo.modalities.action_chunks.trajectories import LAYOUT

        return LAYOUT


def phases_of(policy: ActionChunkPolicyParams) -> "tuple[Phase, ...]":
    """Returns the phases that the labeller tells apart, with their colors."""
    # Imported here: it imports torch, which `grpo check` need not load.
    from grpo.modalities.action_chunks.phases import PHASE_NAMES
    from grpo.modalities.shared.exhibits import Phase

    named = zip(PHASE_NAMES[policy.phases], PHASE_COLORS[policy.phases], strict=True)
    return tuple(Phase(name=name, color=color) for name, color in named)
