"""What differs between the families of models: image tokens, attention, positions, processors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from grpo.errors import ParameterError
from grpo.schema import PARAMS

IMAGE, VIDEO = "<image>", "<video>"
VISION_START, VISION_END = "<vision_start>", "<vision_end>"
FRAME, WHOLE = "<fake_token_around_image>", "<global-img>"  # around the tokens of an image


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is needed to read prompts and to score answers as the model's own classes do."""

    # The plain prompt: {image} stands for one image token, {start} for the start token.
    plain: str
    # Returns the text that takes the place of an image token.
    expand: Callable[[str, Any, Mapping[str, Any]], str]  # token, config, inputs of the image
    make_image_processor: Callable[[Any], Any]  # takes the configuration of a fresh model
    marks: Mapping[str, str]  # configuration key -> special token of a fresh tokenizer
    more_marks: tuple[str, ...] = ()  # special tokens that no configuration names
    read_options: Mapping[str, Any] = field(default_factory=dict)  # of the image processor
    sees_whole_prompt: bool = False  # prompt tokens also attend to later prompt tokens
    first_position: int = 0


def _expand_siglip(token: str, config: Any, inputs: Mapping[str, Any]) -> str:
    vision = config.vision_config
    per_side: int = vision.image_size // vision.patch_size
    return token * per_side**2


def _expand_qwen(token: str, config: Any, inputs: Mapping[str, Any]) -> str:
    merged = config.vision_config.spatial_merge_size**2
    return token * int(inputs["image_grid_thw"].prod() // merged)


def _expand_idefics(token: str, config: Any, inputs: Mapping[str, Any]) -> str:
    """Returns the tokens of an image, which may be split into tiles and the whole."""
    vision = config.vision_config
    tile = token * ((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)
    (rows,), (columns,) = inputs["rows"][0], inputs["cols"][0]
    lines = [
        "".join(f"{FRAME}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns))
        for row in range(rows)
    ]
    return "\n".join([*lines, *([""] if lines else []), f"{FRAME}{WHOLE}{tile}{FRAME}"])


def _make_siglip_processor(config: Any) -> Any:
    side = config.vision_config.image_size
    return SiglipImageProcessorPil(size={"height": side, "width": side})


def _make_qwen_processor(config: Any) -> Any:
    vision = config.vision_config
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=(vision.patch_size * vision.spatial_merge_size) ** 2,
    )


def _make_idefics_processor(config: Any) -> Any:
    side = {"longest_edge": config.vision_config.image_size}
    return Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)


_IDEFICS = Family(
    plain="{image}{question}",
    expand=_expand_idefics,
    make_image_processor=_make_idefics_processor,
    marks={"image_token_id": IMAGE},
    more_marks=(FRAME, WHOLE),
    read_options={"return_row_col_info": True},
)
FAMILIES = {  # by model_type of the configuration
    "paligemma": Family(
        plain="{image}{start}{question}\n",
        expand=_expand_siglip,
        make_image_processor=_make_siglip_processor,
        marks={"image_token_id": IMAGE},
        sees_whole_prompt=True,
        first_position=1,
    ),
    "qwen2_5_vl": Family(
        plain="{vision_start}{image}{vision_end}{question}",
        expand=_expand_qwen,
        make_image_processor=_make_qwen_processor,
        marks={
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        },
    ),
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
}


def find_family(config: Any) -> Family:
    """Returns the family of a model's configuration.

    Raises:
      ParameterError: If there is none.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ParameterError(
            f"{PARAMS}: policy.base must be a model of type {', '.join(FAMILIES)}, got "
            f"{config.model_type!r}"
        )
    return family


def find_positions(
    core: Any, family: Family, tokens: Tensor, mask: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the position ids of prompts [..., prompt, width] and those of the first answer token.

    Args:
      core: The model without its head.
      mask: False on padding, whose positions are arbitrary.
      inputs: Those of the vision tower.
    """
    lengths = mask.sum(dim=1, keepdim=True)
    if not hasattr(core, "get_rope_index"):
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0) + family.first_position
        return positions, lengths + family.first_position
    of_image = (tokens == core.config.image_token_id).int()
    positions, delta = core.get_rope_index(
        tokens, of_image, inputs["image_grid_thw"], attention_mask=mask.long()
    )
    return positions, lengths + delta
