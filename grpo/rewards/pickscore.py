"""The judge PickScore: a CLIP model trained on human preferences."""

from grpo.rewards.base import Judge, JudgeInputs, Viewer
from grpo.rewards.clip import load_clip
from grpo.schema import HubBase

# The processor that PickScore's model card names.
PROCESSOR = HubBase(
    source="hub",
    id="laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    revision="1c2b8495b28150b8a4922ee1c8edee224c284c0c",
)


def load(inputs: JudgeInputs) -> Viewer:
    """Returns the judge of `load_clip` with PickScore's processor."""
    return load_clip(inputs, PROCESSOR)


JUDGE = Judge(reads="media", load=load, needs_model=True)
