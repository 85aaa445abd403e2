"""Parameters of chunked action policies: what they see, decode, imitate and act in."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo.modalities.shared.parameters import Lora, PolicyParams, ScratchBackbone
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


Headless = Annotated[
    ScratchBackbone | DirectoryBase | HubBase | S3Base, Field(discriminator="source")
]


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
