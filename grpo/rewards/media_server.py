"""The judge that asks a server for the scores of several images or clips at a time."""

import base64
import importlib.util
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from grpo.errors import MissingExtraError
from grpo.rewards._servers import (
    RowServerSettings,
    ask_about_rows,
    open_server,
    read_list,
    write_tasks,
)
from grpo.rewards.base import ROLLOUTS_PER_SHARD, Judge, JudgeInputs, Task, Unjudged, View, Viewer
from grpo.runtime.artifacts.media import encode_whole_png
from grpo.runtime.servers import Server
from grpo.schema import PARAMS

Rollout = tuple[NDArray[np.uint8], Task]  # its image or clip, and its task


class MediaServerSettings(RowServerSettings):
    """A server of rewards of images and clips."""


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
    """Returns a judge whose raw scores are those of a server; see `ask_about_rows`."""
    ask = partial(
        ask_about_rows,
        server,
        write_media,
        read_list,
        rows_per_request=settings.rollouts_per_request,
    )

    def view(media: NDArray[np.uint8], tasks: Sequence[Task]) -> list[View | Unjudged]:
        return ask([*zip(media, tasks)])

    return view


def write_media(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request: lists of one item per rollout.

    An item of `media` is the list of a rollout's frames as PNG in base64: one of an image, all of a
    clip.
    """
    return {
        "media": [write_frames(each) for each, _ in rollouts],
        **write_tasks([task for _, task in rollouts]),
    }


def write_frames(media: NDArray[np.uint8]) -> list[str]:
    """Returns the frames of an image [channel, height, width] or a clip [channel, frame, ...]."""
    frames = [media] if media.ndim == 3 else media.swapaxes(0, 1)
    return [base64.b64encode(encode_whole_png(each)).decode() for each in frames]


JUDGE = Judge(
    reads="media", load=load, rollouts_per_call=ROLLOUTS_PER_SHARD, settings=MediaServerSettings
)
