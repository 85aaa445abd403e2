"""Moving texts: clips that are read and followed as they were drawn, and a Wan that draws them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo.errors import ParameterError
from grpo.modalities.denoising.bases import make_pipeline
from grpo.modalities.denoising.flow_matching import Drawings, match_flow
from grpo.modalities.denoising.modality import Variants
from grpo.modalities.denoising.pipelines import load_pipeline, save_pipeline
from grpo.modalities.denoising.policy import DenoisingPolicy
from grpo.modalities.denoising.variants import find_variants
from grpo.modalities.shared.drawings import ARROWS, Drawing, draw_clips, split_text
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.params.parameters import Parameters, read_params
from grpo.rewards.base import Task
from grpo.rewards.moving_ocr import score_motion, view_moving_texts
from grpo.runtime.artifacts.media import encode_png, film_strip, png_size
from grpo.wiring.tasks import build_prompts
from tests.modalities.tiny_denoiser import seeded, tiny_decoding

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "clips.yaml"
STYLE = Drawing(10, 16, 8, 6)
TEXTS = [f"{text} {arrow}" for text in ("AK", "27", "XY", "83") for arrow in ARROWS]


def clips_of(texts: list[str]):
    return draw_clips(texts, STYLE, frames=3, pixels_per_frame=2)


def task_of(text: str) -> Task:
    written, (right, down) = split_text(text)
    return Task(
        family="", prompt=text, answer=written, entry={"right": 2 * right, "down": 2 * down}
    )


def twice(way: tuple[int, int]) -> tuple[float, float]:
    return 2.0 * way[0], 2.0 * way[1]


def scores(media, texts: list[str]) -> list[float]:
    return [each.score for each in view_moving_texts(media, [task_of(text) for text in texts])]


def tiny_params() -> Parameters:
    """Returns the recipe with a small transformer."""
    params = read_params(RECIPE)
    base = params.policy.base
    small = {**base.transformer, "num_attention_heads": 2, "ffn_dim": 64}
    policy = params.policy.model_copy(
        update={"base": base.model_copy(update={"transformer": small})}
    )
    return params.model_copy(update={"policy": policy})


def tiny_wan(**settings) -> DenoisingPolicy:
    params = tiny_params()
    pipeline = make_pipeline(params, ROOT / "data")
    pipeline.transformer.requires_grad_()
    return DenoisingPolicy(
        pipeline,
        decoding=tiny_decoding(**settings),
        canvas=params.policy.canvas,
        num_tokens=params.policy.caption_tokens,
    )


def test_what_the_warmup_draws_is_read_and_followed():
    found = scores(clips_of(TEXTS), TEXTS)
    assert np.mean(found) > 0.95
    assert min(found) > 0.4


def test_other_ways_other_texts_and_stillness_score_nothing():
    clips = clips_of(TEXTS)
    turned = dict(zip(ARROWS, "<^>v", strict=True))  # none is its own
    assert max(scores(clips, [f"{each[:2]} {turned[each[3]]}" for each in TEXTS])) < 0.1
    assert max(scores(clips, [f"QQ {each[3]}" for each in TEXTS])) == 0
    assert max(scores(np.repeat(clips[:, :, 1:2], 3, axis=2), TEXTS)) == 0
    assert max(scores(np.zeros_like(clips), TEXTS)) == 0
    noise = np.random.default_rng(0).integers(0, 256, clips.shape, dtype=np.uint8)
    assert np.mean(scores(noise, TEXTS)) < 0.05


def test_motion_is_measured_in_pixels():
    """Half of the wanted pixels is half of the score; more than wanted is no better."""
    for arrow, way in ARROWS.items():
        one, two = (
            draw_clips([f"HH {arrow}"], Drawing(20, 24, 8, 6), frames=3, pixels_per_frame=each)[
                0, 0
            ]
            for each in (1, 2)
        )
        assert score_motion(one, twice(way)) == pytest.approx(0.5, abs=0.15)
        assert score_motion(two, twice(way)) > 0.9
        assert score_motion(two, (float(way[0]), float(way[1]))) > 0.95


def test_images_are_no_clips():
    with pytest.raises(ValueError, match="needs clips of one channel"):
        view_moving_texts(clips_of(["AK >"])[:, :, 0], [task_of("AK >")])


def test_prompts_say_how_far_to_move():
    tables = build_prompts(read_params(RECIPE), ROOT / "data")
    for row in tables.eval.to_dict("records"):
        written, (right, down) = split_text(row["prompt"])
        assert row["answer"] == written
        assert json.loads(row["entry"]) == {"right": 2 * right, "down": 2 * down}
    assert not set(tables.eval["prompt"]) & set(tables.warmup["prompt"])


def test_a_clip_is_shown_as_a_strip_of_its_frames():
    clip = clips_of(["AK >"])[0]
    strip = film_strip(clip)
    assert strip.shape == (1, 10, 3 * 16 + 2)
    assert np.array_equal(strip[:, :, 17:33], clip[:, 1])
    assert png_size(encode_png(clip)) == (50, 10)
    assert film_strip(np.zeros((1, 81, 4, 4), np.uint8)).shape == (1, 4, 6 * 4 + 5)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_wan_scores_what_it_sampled_bit_by_bit(guidance: float):
    policy = tiny_wan(guidance=guidance)
    trajectory, logp = policy.sample(["AK >", "27 v"], group_sizes=[3, 2], generator=seeded())
    assert trajectory.media.shape == (5, 1, 3, 10, 16)
    with torch.no_grad():
        for step in range(4):
            needed = trajectory.mask & (torch.arange(5) == step)
            assert torch.equal(policy.log_prob(trajectory, needed)[:, step], logp[:, step])
    back, behavior = policy.unpack(trajectory.pack(logp), trajectory.group)
    assert torch.equal(behavior, logp)
    assert torch.equal(back.after, trajectory.after)
    # One patch holds the whole clip.
    rows = torch.arange(len(trajectory.mask))
    widths = policy.widths(trajectory, rows, trajectory.mask)
    assert torch.equal(widths, trajectory.mask.sum(dim=1))


def test_a_wan_comes_back_from_its_directory(tmp_path: Path):
    policy = tiny_wan(stochastic="none")
    save_pipeline(tmp_path, policy.pipeline)
    drawn, _ = policy.sample(["AK >"], group_sizes=[2], generator=seeded())
    policy.pipeline = load_pipeline(tmp_path, torch.float32)
    again, _ = policy.sample(["AK >"], group_sizes=[2], generator=seeded())
    assert torch.equal(drawn.media, again.media)


@pytest.mark.long
def test_a_wan_learns_which_way_a_clip_moves():
    """Two captions that differ in their last character, drawn the way they say."""
    policy = tiny_wan(stochastic="none", num_steps=10)
    texts = ["27 >", "27 <"] * 8
    drawings = Drawings(captions=texts, pixels=torch.from_numpy(clips_of(texts)))
    settings = WarmupSettings(updates=150, rows_per_update=16, learning_rate=5e-3, seed=0)
    list(match_flow(policy.pipeline, drawings, settings, num_tokens=6, blank_fraction=0.0))
    drawn, _ = policy.sample(texts[:2], group_sizes=[8, 8], generator=seeded())
    for index, arrow in enumerate(("><", "<>")):
        clips = drawn.media[drawn.group == index].numpy()[:, 0]
        own, other = (np.mean([score_motion(c, twice(ARROWS[a])) for c in clips]) for a in arrow)
        assert own > other + 0.25


def test_a_wans_encoder_can_be_perturbed():
    policy = tiny_wan()
    settings = Variants(
        count=3,
        similarity=0.9,
        tolerance=0.02,
        diversity=0.0,
        init=0.01,
        updates=20,
        learning_rate=0.05,
        share=0.5,
    )
    found, flops = find_variants(policy.pipeline, ["AK >"], 6, settings, seeded())
    first, second = found["encoder_hidden_states"]
    assert not torch.equal(first, second)
    assert flops > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("frames: 3", "task.pixels_per_frame and more than one of policy.canvas.frames need each"),
        ("architecture: WanPipeline", "policy.base.architecture must be WanPipeline for clips"),
        ("judge: moving_ocr", "patch_size"),
    ],
)
def test_clips_and_images_are_not_mixed(tmp_path: Path, changed: str, message: str):
    others = {
        "frames: 3": "frames: 1",
        "architecture: WanPipeline": "architecture: StableDiffusion3Pipeline",
        "judge: moving_ocr": "judge: moving_ocr",
    }
    text = RECIPE.read_text().replace(changed, others[changed])
    if changed.startswith("judge"):
        text = (ROOT / "recipes" / "glyphs.yaml").read_text().replace("judge: ocr", changed)
        message = "the judge moving_ocr needs task.pixels_per_frame"
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=message):
        read_params(path)
