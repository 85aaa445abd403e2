"""Judges by a model with CLIP's two towers: how well an image fits its prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from grpo.rewards.base import Task, View, Viewer
from grpo.rewards.frames import take_frames


def view_by_clip(model: Any, processor: Any) -> Viewer:
    """Returns a judge of images and clips by their cosine with the prompt. [CLIP score, PickScore]

    The raw score is the model's own: logit_scale * cos(image, prompt), of a clip the mean over
    frames.

    Args:
      model: A CLIPModel in evaluation mode.
      processor: Its CLIPProcessor.
    """

    def view(media: UInt8[np.ndarray, "row ..."], tasks: Sequence[Task]) -> list[View]:
        raw = score_images(model, processor, take_frames(media), [each.prompt for each in tasks])
        return [View(f"{each:.3f}", float(each)) for each in raw]

    return view


@torch.no_grad()
def score_images(
    model: Any,
    processor: Any,
    frames: UInt8[np.ndarray, "row frame channel height width"],
    prompts: Sequence[str],
) -> Float[np.ndarray, " row"]:
    """Returns logit_scale * cos(image, prompt), the mean over a row's frames.

    Prompts are padded, and cut, to what the model takes: company changes nothing.
    """
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
    logits = model(**inputs).logits_per_image.reshape(rows, per_row, rows)
    own: np.ndarray = logits.diagonal(dim1=0, dim2=2).mean(dim=0).double().cpu().numpy()
    return own
