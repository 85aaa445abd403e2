"""The judge of drawn text: OCR (PP-OCRv4 in rapidocr-onnxruntime) against the prompt's text."""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.errors import MissingExtraError
from grpo.rewards.base import Judge, JudgeInputs, Task, View, Viewer, take_frames
from grpo.schema import PARAMS

IMAGES_AT_ONCE = 16
LEVELS = 255


def load(inputs: JudgeInputs) -> Viewer:
    """Returns the judge.

    Raises:
      MissingExtraError: If rapidocr-onnxruntime is not installed.
    """
    _recognizer()
    return view_texts


def view_texts(media: NDArray[np.uint8], tasks: Sequence[Task]) -> list[View]:
    """Returns the recognized text and score of each image; for a clip, the mean over frames.

    Args:
      media: Images in the format of `read_texts`; clips have a frame axis after the channels.
    """
    frames = take_frames(media)
    rows, per_row = frames.shape[:2]
    read = read_texts(frames.reshape(rows * per_row, *frames.shape[2:]))
    views = []
    for row, task in enumerate(tasks):
        texts = read[row * per_row : (row + 1) * per_row]
        score = sum(score_text(each, task) for each in texts) / per_row
        views.append(View(" | ".join(texts), score))
    return views


def read_texts(images: NDArray[np.uint8]) -> list[str]:
    """Returns the recognized texts in capitals, without spaces.

    Args:
      images: Light on dark, shape [image, channel, height, width], one channel or three.
    """
    if len(images) == 0:
        return []
    dark_on_light = LEVELS - images.transpose(0, 2, 3, 1)
    colored = np.repeat(dark_on_light, 3, axis=3) if images.shape[1] == 1 else dark_on_light
    found, _ = _recognizer()(list(np.ascontiguousarray(colored)))
    # The recognizer may return full-width forms of digits and letters.
    return ["".join(unicodedata.normalize("NFKC", text).upper().split()) for text, *_ in found]


def score_text(answer: str, task: Task) -> float:
    """Returns 1 - edit distance / length of the wanted text, at least 0. [Flow-GRPO, OCR reward]"""
    from rapidfuzz.distance import Levenshtein

    wanted = task.answer.upper()
    return max(0.0, 1.0 - Levenshtein.distance(answer, wanted) / len(wanted))


@cache
def _recognizer() -> Any:
    """Returns the recognition model only; text detection is not needed."""
    try:
        # Imported here: an extra, which `grpo check` does not need.
        from rapidocr_onnxruntime import RapidOCR
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: the judge ocr needs rapidocr-onnxruntime; run pip install -e '.[ocr]'"
        ) from None
    recognizer = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1).text_rec
    recognizer.rec_batch_num = IMAGES_AT_ONCE
    # Width 0 pads images to the widest of their batch instead of to 320 pixels.
    recognizer.rec_image_shape = [3, 48, 0]
    return recognizer


JUDGE = Judge(reads="media", load=load)
