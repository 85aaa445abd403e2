"""The judge of media behind a server: what it sends, and what it makes of what comes back."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from grpo.rewards.media_server import MediaServerSettings, load
from grpo.sampling.judging import JointJudge
from grpo.sampling.outcomes import Outcome
from tests.rewards.servers import Response, as_json, inputs_with, serving, tasks_of

SETTINGS: dict[str, Any] = {
    "concurrency": 1,
    "timeout_seconds": 5.0,
    "retries": 0,
    "retry_seconds": 0.01,
    "rollouts_per_request": 2,
}


def judge(url: str, media: np.ndarray) -> list[Outcome]:
    view = load(inputs_with(MediaServerSettings(url=url, **SETTINGS)))
    tasks = tasks_of(*"abc"[: len(media)])
    joint = JointJudge(view=view, reads_media=True, rollouts_per_call=128)
    return [outcome for _, outcome in joint.judge(media, tasks)]


def pixels(frame: str) -> np.ndarray:
    picture = Image.open(io.BytesIO(base64.b64decode(frame)), formats=["PNG"])
    found = np.asarray(picture)
    return found[None] if found.ndim == 2 else found.transpose(2, 0, 1)


def test_every_pixel_of_every_frame_is_sent_in_the_order_of_the_rollouts():
    """Also of images that are wider than what the report shows."""
    random = np.random.default_rng(0)
    for shape in [(1, 3, 400), (3, 7, 5), (3, 4, 7, 5)]:
        media = random.integers(0, 256, (3, *shape), dtype=np.uint8)
        with serving(lambda body: as_json([0.5] * len(body["media"]))) as asked:
            assert judge(asked.url, media) == [Outcome(0.5, "scored")] * 3
        assert [each["prompts"] for each in asked.bodies] == [["a", "b"], ["c"]]
        sent = [frames for body in asked.bodies for frames in body["media"]]
        for frames, item in zip(sent, media, strict=True):
            found = np.stack([pixels(each) for each in frames], axis=1)
            np.testing.assert_array_equal(found, item if item.ndim == 4 else item[:, None])


def test_an_image_that_the_server_cannot_judge_fails_alone():
    def respond(body: Any) -> Response:
        if "b" in body["prompts"] and len(body["prompts"]) > 1:
            return Response(b"", 422)
        failed = {"status": "failed", "detail": "no face"}
        return as_json([failed if each == "b" else 0.25 for each in body["prompts"]])

    with serving(respond) as asked:
        outcomes = judge(asked.url, np.zeros((3, 1, 2, 2), np.uint8))
        assert [each.status for each in outcomes] == ["scored", "failed", "scored"]
        assert outcomes[1].detail == f"{asked.url}: no face"
        with serving(lambda body: as_json({"rewards": [1]})) as other:
            assert (
                "must be a list of scores"
                in judge(other.url, np.zeros((1, 1, 2, 2), np.uint8))[0].detail
            )
