"""Judges of media: every item once, in batches, and nothing they do crashes a run."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from grpo.errors import ArtifactError
from grpo.modalities.shared.drawings import Drawing, draw_texts
from grpo.rewards import ocr
from grpo.rewards.base import (
    FRAMES_PER_CLIP,
    ROLLOUTS_PER_CALL,
    ROLLOUTS_PER_SHARD,
    Task,
    View,
    Viewer,
    take_frames,
)
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.judging import JointJudge
from grpo.sampling.rollouts import SampledBatch, write_batch
from grpo.sampling.scoring import (
    Judged,
    RewardRule,
    judge_rollouts,
    judge_stored,
    judging_skill,
)
from grpo.types import Cost
from tests.rewards.rules import rule_with

TASK = Task(family="digits", prompt="draw 234", answer="234", entry={})
STYLE = Drawing(16, 32, 11, 8)
BROKEN, ODD = 7, 9  # pixels of the items that a test's viewer cannot judge


PROMPTS = pd.DataFrame(
    [{"prompt_id": "p", "family": "f", "prompt": "draw 234", "answer": "234", "entry": "{}"}]
)


def rollouts_of(media: np.ndarray) -> pd.DataFrame:
    """Returns one rollout per row of `media`, all of one prompt."""
    ids = [f"p/{row}" for row in range(len(media))]
    table = pd.DataFrame({"rollout_id": ids, "prompt_id": "p", "group": 0, "text": ""})
    return table.assign(steps=1, is_finished=True)


def rule_of(view: Viewer) -> RewardRule:
    return rule_with(JointJudge(view=view, reads_media=True), maximize="score")


def judge(view: Viewer, media: np.ndarray) -> Judged:
    rollouts = rollouts_of(media)
    return judge_rollouts(rollouts, PROMPTS, rule_of(view), media=media)


def items(values: Sequence[int], *shape: int) -> np.ndarray:
    """Returns one item per value, all its pixels of that value."""
    filled = np.array(values, dtype=np.uint8).reshape(-1, *[1 for _ in shape])
    return np.broadcast_to(filled, (len(values), *shape)).copy()


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 5, 2, 2)], ids=["images", "clips"])
def test_what_a_viewer_cannot_judge_fails_alone(shape: tuple[int, ...]):
    """It raises on a whole batch that holds a broken item; the others keep their scores."""

    def view(media: np.ndarray, tasks: Sequence[Task]) -> list[View]:
        assert {each.prompt for each in tasks} == {"draw 234"}
        if (media == BROKEN).any():
            raise RuntimeError("a viewer's own bug")
        return [View(f"{each.flat[0]}", each.flat[0] / 10) for each in media]

    texts, rewards = judge(view, items([1, BROKEN, 6, 12], *shape))
    assert texts == ["1", "", "6", "12"]
    assert rewards["status"].tolist() == ["scored", "failed", "scored", "failed"]  # 1.2 is no score
    assert rewards["reward"].tolist() == [0.1, 0.0, 0.6, 0.0]
    assert rewards["outcome"].tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("score", [math.nan, -0.1, 1.1, math.inf, None, "high"])
def test_what_is_no_score_in_0_to_1_is_failed(score: object):
    def view(media: np.ndarray, tasks: Sequence[Task]) -> list[View]:
        return [View("", score if each.flat[0] == ODD else 1.0) for each in media]  # type: ignore

    rewards = judge(view, items([0, ODD], 1, 2, 2)).rewards
    assert rewards["status"].tolist() == ["scored", "failed"]
    assert rewards["reward"].tolist() == [1.0, 0.0]


def test_a_viewer_that_loses_items_is_failed_not_misread():
    rewards = judge(lambda media, tasks: [View("", 1.0)] * 3, items([0, 1], 1, 2, 2)).rewards
    assert rewards["status"].tolist() == ["failed", "failed"]


def test_shards_show_the_viewer_what_it_would_see_without_them(tmp_path: Path):
    """Each item once, in batches of the same items: numbers may depend on who is beside whom."""
    batches: list[list[int]] = []

    def view(media: np.ndarray, tasks: Sequence[Task]) -> list[View]:
        assert len(media) == len(tasks)
        batches.append([int(each.flat[0]) for each in media])
        return [View(str(each.flat[0]), each.flat[0] / 255) for each in media]

    media = items(range(ROLLOUTS_PER_SHARD + ROLLOUTS_PER_CALL + 1), 1, 2, 2)
    whole = judge(view, media)
    tensors = {"media": torch.from_numpy(media)}
    write_batch(tmp_path, SampledBatch(table=rollouts_of(media), tensors=tensors, cost=Cost()))
    moments: list[tuple[int, int]] = []
    sharded = judge_stored(
        Local(Work({"judge": judging_skill(rule_of(view).judges, PROMPTS)})),
        [tmp_path],
        rule_of(view).shaping,
        scratch=tmp_path / "judged",
        progress=lambda done, total: moments.append((done, total)),
    )
    assert batches[: len(batches) // 2] == batches[len(batches) // 2 :]
    assert [each for batch in batches for each in batch] == [*range(len(media))] * 2
    assert sharded.texts == whole.texts
    pd.testing.assert_frame_equal(sharded.rewards, whole.rewards)
    assert moments == [(0, 2), (1, 2), (2, 2)]


def test_media_must_be_there():
    rule = rule_of(lambda media, tasks: [])
    prompts = pd.DataFrame(
        [{"prompt_id": "p", "family": "f", "prompt": "", "answer": "", "entry": "{}"}]
    )
    rollouts = pd.DataFrame([{"rollout_id": "p/0", "prompt_id": "p", "is_finished": True}])
    with pytest.raises(ArtifactError, match="must have an image per rollout, has 0 for 1"):
        judge_rollouts(rollouts, prompts, rule)


def test_an_ocr_model_that_raises_on_one_image_is_no_crash():
    """The real recognizer, but for a white image, on which it raises as onnxruntime may."""

    def view(images: np.ndarray, tasks: Sequence[Task]) -> list[View]:
        if any((image == 255).all() for image in images):
            raise RuntimeError("onnxruntime: invalid input")
        return ocr.view_texts(images, tasks)

    media = draw_texts(["234", "234", "235"], STYLE)
    media[1] = 255
    texts, rewards = judge(view, media)
    assert texts == ["234", "", "235"]
    assert rewards["status"].tolist() == ["scored", "failed", "scored"]
    assert rewards["reward"].tolist() == pytest.approx([1, 0, 2 / 3])


def test_frames_are_evenly_spaced_and_an_image_is_one():
    """Of 15 frames numbered 0 to 14, every second one; of 3, all; an image is its own frame."""
    clip = np.broadcast_to(np.arange(15, dtype=np.uint8)[:, None, None], (2, 3, 15, 4, 5))
    frames = take_frames(clip)
    assert frames.shape == (2, FRAMES_PER_CLIP, 3, 4, 5)
    assert frames[1, :, 2, 0, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert take_frames(clip[:, :, :3])[0, :, 0, 0, 0].tolist() == [0, 1, 2]
    image = items([3, 4], 1, 2, 2)
    assert np.array_equal(take_frames(image)[:, 0], image)


def test_ocr_of_a_clip_is_the_mean_over_its_frames():
    """Two frames, one right, one with a letter of three wrong: (1 + 2/3) / 2."""
    frames = draw_texts(["234", "235"], STYLE)
    clips = np.stack([frames, frames[:1].repeat(2, axis=0)]).swapaxes(1, 2)
    views = ocr.view_texts(clips, [TASK, TASK])
    assert [each.text for each in views] == ["234 | 235", "234 | 234"]
    assert [each.score for each in views] == pytest.approx([5 / 6, 1])
