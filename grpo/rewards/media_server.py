"""The judge that asks a server for the scores of several images or clips at a time."""

import base64
import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from grpo.errors import MissingExtraError
from grpo.rewards._servers import (
    UNSUITABLE,
    Failure,
    Server,
    ServerSettings,
    ask_rows,
    ask_server,
    divide,
    open_server,
)
from grpo.rewards.base import ROLLOUTS_PER_SHARD, Judge, JudgeInputs, Task, Unjudged, View, Viewer
from grpo.runtime.artifacts.media import encode_whole_png
from grpo.schema import PARAMS

Rollout = tuple[NDArray[np.uint8], Task]  # its image or clip, and its task


class MediaServerSettings(ServerSettings):
    """A server of rewards of images and clips."""

    rollouts_per_request: Annotated[int, Field(gt=0, le=ROLLOUTS_PER_SHARD)]


def load(inputs: JudgeInputs) -> Viewer:
    """Returns the judge.

    Raises:
      MissingExtraError: If Pillow is not installed.
      ParameterError: If the server's key is not in the environment.
    """
    settings = inputs.settings
    assert isinstance(settings, MediaServerSettings)
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError(
            f"{PARAMS}: the judge media_server needs Pillow; run pip install -e '.[denoising]'"
        )
    return view_by_server(settings, open_server(settings, inputs.where))


def view_by_server(settings: MediaServerSettings, server: Server) -> Viewer:
    """Returns a judge whose raw scores are those of a server; see `ask_rows`."""
    ask = partial(ask_rows, server, write_media, partial(_read, server))

    def view(media: NDArray[np.uint8], tasks: Sequence[Task]) -> list[View | Unjudged]:
        rollouts, size = [*zip(media, tasks)], settings.rollouts_per_request
        asks = [partial(ask, each) for each in divide(rollouts, size)]
        return ask_server(server, asks, rollouts=len(rollouts))

    return view


def write_media(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request: lists of one item per rollout.

    An item of `media` is the list of a rollout's frames as PNG in base64: one of an image, all of a
    clip.
    """
    return {
        "prompts": [task.prompt for _, task in rollouts],
        "media": [write_frames(each) for each, _ in rollouts],
        "answers": [task.answer for _, task in rollouts],
        "families": [task.family for _, task in rollouts],
        "entries": [task.entry for _, task in rollouts],
    }


def write_frames(media: NDArray[np.uint8]) -> list[str]:
    """Returns the frames of an image [channel, height, width] or a clip [channel, frame, ...]."""
    frames = [media] if media.ndim == 3 else media.swapaxes(0, 1)
    return [base64.b64encode(encode_whole_png(each)).decode() for each in frames]


def _read(server: Server, content: object) -> list[object] | Failure:
    """Returns the list of scores in a response."""
    match content:
        case [*scores]:
            return scores
    return server.fail(UNSUITABLE, f"the response must be a list of scores, is {content!r}")


JUDGE = Judge(
    reads="media", load=load, rollouts_per_call=ROLLOUTS_PER_SHARD, settings=MediaServerSettings
)
