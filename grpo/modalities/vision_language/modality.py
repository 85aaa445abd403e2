"""The modality of vision-language models: its parameters and its implementation of `Modality`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from grpo.modalities.modality import (
    PairWarmup,
    RunParams,
)
from grpo.modalities.shared.text_modality import Decoding, TextModality, TextPolicyParams
from grpo.schema import DirectoryBase, HubBase, S3Base, Strict

if TYPE_CHECKING:
    import pandas as pd

    from grpo.modalities.shared.exhibits import Picture
    from grpo.modalities.shared.packed import Layout
    from grpo.modalities.shared.warmup import BasePolicy
    from grpo.modalities.vision_language.policy import VisionLanguagePolicy
    from grpo.runtime.artifacts.stored_iterations import IterationFiles
    from grpo.runtime.dry_run import DryRun


class ScratchBase(Strict):
    """A fresh model of a `transformers` class with a tokenizer of the warm-up's words."""

    source: Literal["scratch"]
    architecture: str  # e.g. PaliGemmaForConditionalGeneration
    config: dict[str, int | float | str | bool]
    vision_config: dict[str, Any]
    text_config: dict[str, Any]
    warmup: PairWarmup


Base = Annotated[ScratchBase | DirectoryBase | HubBase | S3Base, Field(discriminator="source")]


class VisionLanguagePolicyParams(TextPolicyParams):
    """A vision-language model."""

    kind: Literal["vision_language"]
    base: Base
    prompt_format: Literal["plain", "chat"]

    def fresh_configs(self) -> Mapping[str, Mapping[str, Any]]:
        base = self.base
        if not isinstance(base, ScratchBase):
            return {}
        return {
            "policy.base.config": base.config,
            "policy.base.vision_config": base.vision_config,
            "policy.base.text_config": base.text_config,
        }


class VisionLanguage(TextModality[VisionLanguagePolicyParams]):
    """Vision-language models of transformers; a step is a token of the answer."""

    kind = "vision_language"
    policy = VisionLanguagePolicyParams
    prompt_kind = "image"
    step_name = "answer token"
    has_library_format = True

    def make_base(self, params: RunParams[VisionLanguagePolicyParams], data: Path) -> "BasePolicy":
        from grpo.modalities.vision_language.bases import make_base_policy

        return make_base_policy(params, data)

    def show_rollouts(
        self,
        artifacts: Path,
        params: RunParams[VisionLanguagePolicyParams],
        files: "IterationFiles",
        rollouts: "pd.DataFrame",
        chosen: "pd.DataFrame",
        *,
        has_media: bool,
    ) -> "Sequence[Picture]":
        """Returns the image of each prompt with the boxes and points of answer and rollout."""
        from grpo.modalities.vision_language.pictures import draw_answers

        return draw_answers(artifacts, rollouts, chosen)

    def illustrate(self, prompt: str, answer: str, text: str) -> bytes:
        """Returns the image of a prompt with the boxes and points of answer and rollout."""
        from grpo.modalities.shared.images import split_prompt
        from grpo.modalities.vision_language.pictures import draw_objects

        image, _ = split_prompt(prompt)
        return draw_objects(image, answer, text)

    def load_policy(
        self,
        params: RunParams[VisionLanguagePolicyParams],
        *,
        base: Path,
        directory: Path,
        draws: Decoding,
        policies_per_host: int = 1,
    ) -> "VisionLanguagePolicy":
        from grpo.modalities.vision_language.policy import load_vision_language_policy

        return load_vision_language_policy(params, base=base, directory=directory, decoding=draws)

    def load_unfilled(
        self,
        params: RunParams[VisionLanguagePolicyParams],
        *,
        data: Path,
        draws: Decoding,
        run: "DryRun",
    ) -> "VisionLanguagePolicy":
        from grpo.modalities.vision_language.bases import load_unfilled

        return load_unfilled(params, data=data, decoding=draws, run=run)

    def layout(self, policy: VisionLanguagePolicyParams, base: Path) -> "Layout":
        from grpo.modalities.vision_language.policy import LAYOUT

        return LAYOUT
