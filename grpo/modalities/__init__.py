"""One folder per kind of step; a modality is registered here, by a line."""

from typing import Any

from grpo.modalities.action_chunks.modality import ActionChunks
from grpo.modalities.denoising.modality import Denoising
from grpo.modalities.modality import Modality
from grpo.modalities.tokens.modality import Tokens

MODALITIES: dict[str, Modality[Any, Any, Any]] = {
    each.kind: each for each in (Tokens(), Denoising(), ActionChunks())
}
