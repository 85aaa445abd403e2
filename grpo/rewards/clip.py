"""CLIP judges: the similarity of an image and its prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from grpo.errors import refused_by_library
from grpo.rewards.base import Judge, JudgeInputs, Task, View, Viewer, take_frames
from grpo.runtime.sources import Source, find_source, refusal
from grpo.schema import HubBase


def load_clip(inputs: JudgeInputs, processor: HubBase | None = None) -> Viewer:
    """Returns a judge with a CLIP model on the machine's device.

    Args:
      processor: Source of the processor for a model from the hub; None: the model's source.

    Raises:
      ParameterError: If the model cannot be loaded or the device does not exist.
    """
    # Imported here: these import torch, which `grpo check` does not need.
    from transformers import CLIPModel

    from grpo.rewards._frozen_models import load_frozen
    from grpo.runtime.machine import prepare_machine

    assert inputs.model is not None
    prepare_machine(inputs.machine)
    weights = find_source(inputs.model, inputs.data, parameter=f"{inputs.where}.model")
    if processor is None or weights.is_local:
        readings = weights
    else:
        readings = find_source(processor, inputs.data, parameter=f"{inputs.where}.model")
    model = load_frozen(weights, CLIPModel).to(inputs.machine.device)
    return view_by_clip(model, _load_processor(readings))


def view_by_clip(model: Any, processor: Any) -> Viewer:
    """Returns a judge of images and clips by their cosine with the prompt. [CLIP score, PickScore]

    The raw score is the model's logit_scale * cos(image, prompt); for a clip, its mean over frames.

    Args:
      model: A CLIPModel in evaluation mode.
      processor: Its CLIPProcessor.
    """

    def view(media: UInt8[np.ndarray, "row ..."], tasks: Sequence[Task]) -> list[View]:
        raw = score_images(model, processor, take_frames(media), [each.prompt for each in tasks])
        return [View(f"{each:.3f}", float(each)) for each in raw]

    return view


def score_images(
    model: Any,
    processor: Any,
    frames: UInt8[np.ndarray, "row frame channel height width"],
    prompts: Sequence[str],
) -> Float[np.ndarray, " row"]:
    """Returns the mean of logit_scale * cos(image, prompt) over the frames of each row.

    Prompts are padded or truncated to the model's length, so a score does not depend on the batch.
    """
    import torch

    rows, per_row = frames.shape[:2]
    images = frames.reshape(rows * per_row, *frames.shape[2:])
    inputs = processor(
        text=list(prompts),
        images=list(np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images),
        input_data_format="channels_first",
        padding="max_length",
        truncation=True,
        max_length=model.config.text_config.max_position_embeddings,
        return_tensors="pt",
    ).to(model.device)
    with torch.no_grad():
        logits = model(**inputs).logits_per_image.reshape(rows, per_row, rows)
    own: np.ndarray = logits.diagonal(dim1=0, dim2=2).mean(dim=0).double().cpu().numpy()
    return own


def _load_processor(source: Source) -> Any:
    from transformers import CLIPProcessor

    from_pretrained: Any = CLIPProcessor.from_pretrained
    with refused_by_library(lambda why: refusal(source, why)):
        return from_pretrained(
            source.name,
            revision=source.revision,
            # The other backend resizes slightly differently and is not available everywhere.
            backend="pil",
            trust_remote_code=False,
            local_files_only=source.is_local,
        )


JUDGE = Judge(reads="media", load=load_clip, needs_model=True)
