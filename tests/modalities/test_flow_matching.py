"""The warm-up of a fresh pipeline: it learns what it is shown, the same way every time."""

from typing import Any

import pandas as pd
import pytest
import torch

from grpo.errors import ParameterError
from grpo.modalities.denoising.flow_matching import Drawings, match_flow
from grpo.modalities.shared.drawings import Drawing, draw_texts
from grpo.modalities.shared.warmup import WarmupSettings, WarmupUpdate
from grpo.wiring.policies import build_base
from tests.modalities.tiny_denoiser import ROOT, tiny_denoiser, tiny_params

TEXTS = ["2", "7"]
SETTINGS = WarmupSettings(updates=200, rows_per_update=16, learning_rate=5e-3, seed=0)


def warmed(settings: WarmupSettings = SETTINGS, blank_fraction: float = 0.0):
    policy = tiny_denoiser(stochastic="none", num_steps=10)
    shown = TEXTS * 8
    pixels = draw_texts(shown, Drawing(8, 16, 8, 8))
    drawings = Drawings(captions=shown, pixels=torch.from_numpy(pixels))
    updates = list(
        match_flow(policy.pipeline, drawings, settings, num_tokens=1, blank_fraction=blank_fraction)
    )
    return policy, drawings, updates


def mean_loss(updates: list[WarmupUpdate]) -> float:
    return sum(each.loss for each in updates) / len(updates)


@pytest.mark.long
def test_two_drawings_are_learned_and_told_apart_by_their_captions():
    policy, drawings, updates = warmed()
    assert mean_loss(updates[-20:]) < 0.5 * mean_loss(updates[:20])
    drawn, _ = policy.sample(TEXTS, group_sizes=[8, 8], generator=torch.Generator().manual_seed(0))
    images = drawn.media.float()
    for index, wanted in enumerate(drawings.pixels[:2].float()):
        own, other = (images[drawn.group == each].mean(dim=0) for each in (index, 1 - index))
        assert (own - wanted).square().mean() < 0.5 * (other - wanted).square().mean()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("22222", r"max_position_embeddings must be at least 7 for texts of 5 characters, got 6"),
        ("222", r"policy.canvas.width must be at least 24 for 3 characters of 8 pixels, got 16"),
    ],
)
def test_texts_that_would_be_cut_are_refused(text: str, message: str):
    table = pd.DataFrame({"prompt": [text], "solution": [text]})
    base = build_base(tiny_params(), ROOT / "data")
    with pytest.raises(ParameterError, match=message):
        next(base.warm_up(table))


def test_a_fresh_pipeline_in_bfloat16_learns_and_needs_a_canvas_of_whole_patches():
    params = tiny_params()
    params = params.model_copy(
        update={"machine": params.machine.model_copy(update={"dtype": "bfloat16"})}
    )
    table = pd.DataFrame({"prompt": ["2"] * 4, "solution": ["2"] * 4})
    update = next(build_base(params, ROOT / "data").warm_up(table))
    assert 0 < update.loss < 10
    canvas = params.policy.canvas.model_copy(update={"height": params.policy.canvas.height + 1})
    odd = params.model_copy(update={"policy": params.policy.model_copy(update={"canvas": canvas})})
    with pytest.raises(ParameterError, match=r"policy\.canvas\.height must be a multiple of"):
        next(build_base(odd, ROOT / "data").warm_up(table))


def test_the_same_seed_gives_the_same_weights_and_cost():
    short = WarmupSettings(updates=3, rows_per_update=2, learning_rate=5e-3, seed=0)
    (first, _, once), (second, _, again) = (warmed(short, 0.5) for _ in range(2))
    assert once == again
    assert {each.cost.flops for each in once} == {once[0].cost.flops} != {0}
    weights: list[dict[str, Any]] = [each.model.state_dict() for each in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
