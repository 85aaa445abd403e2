"""Modalities, one folder per kind of step; MODALITIES registers each with one line."""

import importlib
from functools import cache
from typing import Any

from grpo.errors import ParameterError
from grpo.modalities.modality import Modality
from grpo.runtime.plugins import import_plugin, is_plugin

# policy.kind -> "module:class". `find_modality` imports a modality on first use.
MODALITIES: dict[str, str | Modality[Any, Any, Any]] = {
    "tokens": "grpo.modalities.tokens.modality:Tokens",
    "denoising": "grpo.modalities.denoising.modality:Denoising",
    "action_chunks": "grpo.modalities.action_chunks.modality:ActionChunks",
    "seq2seq": "grpo.modalities.seq2seq.modality:Seq2Seq",
    "vision_language": "grpo.modalities.vision_language.modality:VisionLanguage",
}


def find_modality(kind: str) -> Modality[Any, Any, Any]:
    """Returns the modality of a policy.kind in MODALITIES, or at a dotted path under plugins/.

    Raises:
      ParameterError: If the dotted path leads to none.
    """
    if is_plugin(kind):
        return _find_own(kind)
    found = MODALITIES[kind]
    if isinstance(found, str):
        module, _, name = found.partition(":")
        made: Modality[Any, Any, Any] = getattr(importlib.import_module(module), name)()
        MODALITIES[kind] = found = made
    return found


def _find_own(kind: str) -> Modality[Any, Any, Any]:
    found: Any = import_plugin(kind)
    if isinstance(found, type) and issubclass(found, Modality):
        return _make(found)
    raise ParameterError(f"{kind}: must be a subclass of Modality")


@cache
def _make(found: type[Modality[Any, Any, Any]]) -> Modality[Any, Any, Any]:
    return found()


def all_modalities() -> dict[str, Modality[Any, Any, Any]]:
    """Returns every modality by its policy.kind; imports them all."""
    return {kind: find_modality(kind) for kind in MODALITIES}
