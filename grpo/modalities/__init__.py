"""Modalities, one folder per kind of step; MODALITIES registers each with one line."""

import importlib
from typing import Any

from grpo.modalities.modality import Modality

# policy.kind -> "module:class". `find_modality` imports a modality on first use.
MODALITIES: dict[str, str | Modality[Any, Any, Any]] = {
    "tokens": "grpo.modalities.tokens.modality:Tokens",
    "denoising": "grpo.modalities.denoising.modality:Denoising",
    "action_chunks": "grpo.modalities.action_chunks.modality:ActionChunks",
    "seq2seq": "grpo.modalities.seq2seq.modality:Seq2Seq",
    "vision_language": "grpo.modalities.vision_language.modality:VisionLanguage",
}


def find_modality(kind: str) -> Modality[Any, Any, Any]:
    """Returns the modality of a policy.kind that is in MODALITIES."""
    found = MODALITIES[kind]
    if isinstance(found, str):
        module, _, name = found.partition(":")
        made: Modality[Any, Any, Any] = getattr(importlib.import_module(module), name)()
        MODALITIES[kind] = found = made
    return found


def all_modalities() -> dict[str, Modality[Any, Any, Any]]:
    """Returns every modality by its policy.kind; imports them all."""
    return {kind: find_modality(kind) for kind in MODALITIES}
