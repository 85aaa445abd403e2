"""The judge of moving text: OCR accuracy of the frames (PP-OCRv4) times a motion score.

The motion score uses optical flow by dense inverse search [Kroeger et al., 2016] in OpenCV.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.rewards import ocr
from grpo.rewards.base import Judge, JudgeInputs, Task, View, Viewer

LIT = 96  # least level of a pixel of the text
BORDER = 4  # dark pixels around a frame, so that the flow can follow text that leaves it
SCALE = 4  # magnification of frames for the flow, whose patches are 8 pixels wide


def load(inputs: JudgeInputs) -> Viewer:
    """Returns the judge.

    Raises:
      MissingExtraError: If rapidocr-onnxruntime is not installed, which brings OpenCV.
    """
    ocr.load(inputs)
    return view_moving_texts


def view_moving_texts(media: NDArray[np.uint8], tasks: Sequence[Task]) -> list[View]:
    """Returns recognized text and score of each clip: text accuracy times `score_motion`.

    Text accuracy is the mean over frames of 1 - edit distance / length, at least 0.

    Args:
      media: Light on dark, shape [clip, 1, frame, height, width].
      tasks: The entry holds the wanted motion `right` and `down` in pixels per frame.
    """
    # Imported here: an extra, which `grpo check` does not need.
    from rapidfuzz.distance import Levenshtein

    if media.ndim != 5 or media.shape[1] != 1:
        raise ValueError(f"moving_ocr needs clips of one channel, got the shape {media.shape}")
    frames = media.shape[2]
    centered = [_center(each) for clip in media[:, 0] for each in clip]
    read = ocr.read_texts(np.stack(centered)[:, None])
    views = []
    for row, (clip, task) in enumerate(zip(media[:, 0], tasks, strict=True)):
        wanted = task.answer
        way = float(str(task.entry["right"])), float(str(task.entry["down"]))
        texts = read[row * frames : (row + 1) * frames]
        distances = [Levenshtein.distance(each, wanted.upper()) for each in texts]
        content = float(np.mean([max(0.0, 1 - each / len(wanted)) for each in distances]))
        motion = score_motion(clip, way)
        views.append(View(f"{' | '.join(texts)} moves {motion:.2f}", content * motion))
    return views


def score_motion(clip: NDArray[np.uint8], way: tuple[float, float]) -> float:
    """Returns the motion score of a clip [frame, height, width] in [0, 1]; 0 without motion.

    The score is the mean over pairs of frames of max(0, cosine of measured and wanted motion) times
    min(1, measured length / wanted length).

    Args:
      way: Wanted motion (right, down) in pixels per frame.
    """
    wanted = float(np.linalg.norm(way))
    scores = []
    for before, after in pairwise(clip):
        flow = _measure_flow(before, after)
        length = float(np.linalg.norm(flow))
        along = float(flow @ np.array(way)) / wanted
        share = min(1.0, length / wanted)
        scores.append(max(0.0, along / length) * share if length > 0 else 0.0)
    return float(np.mean(scores))


def _measure_flow(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Returns the mean flow (right, down) of the lit pixels, in pixels."""
    import cv2

    first, second = (
        cv2.resize(np.pad(each, BORDER), None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_CUBIC)
        for each in (before, after)
    )
    lit = first > LIT
    if not lit.any():
        return np.zeros(2)
    flow = _flow_method().calc(first, second, None)
    mean: NDArray[np.float64] = flow[lit].mean(axis=0, dtype=np.float64) / SCALE
    return mean


def _center(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a frame with its lit pixels moved to the center.

    The recognizer then reads a centered line of text; `score_motion` judges its position.
    """
    rows, columns = np.nonzero(frame > LIT)
    if len(rows) == 0:
        return frame
    height, width = frame.shape
    padded = np.zeros((2 * height, 2 * width), np.uint8)
    top = height - (int(rows.min()) + int(rows.max()) + 1) // 2
    left = width - (int(columns.min()) + int(columns.max()) + 1) // 2
    padded[top : top + height, left : left + width] = frame
    return padded[height // 2 : height // 2 + height, width // 2 : width // 2 + width]


@cache
def _flow_method() -> Any:
    import cv2

    library: Any = cv2  # its stubs lack this method
    library.setNumThreads(1)
    return library.DISOpticalFlow_create(library.DISOPTICAL_FLOW_PRESET_MEDIUM)


JUDGE = Judge(reads="media", load=load)
