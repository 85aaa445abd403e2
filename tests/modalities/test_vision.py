"""Policies that see pictures: what they see decides, is stored, and is what was rendered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.action_chunks.bases import (
    CloningSettings,
    clone_demonstrations,
    make_action_model,
)
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import (
    ActionChunkModel,
    ChunkShape,
    encode_instructions,
    save_action_model,
)
from grpo.modalities.action_chunks.policy import load_chunk_policy
from grpo.modalities.action_chunks.simulation.base import Demonstration
from grpo.modalities.action_chunks.simulation.experts import demonstrate
from grpo.modalities.action_chunks.simulation.metaworld import MetaWorld
from grpo.modalities.action_chunks.simulation.sizes import HAND
from grpo.modalities.shared.directories import PolicyState, write_state
from grpo.modalities.shared.packed import select_packed
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from tests.modalities.tiny import seeded

RECIPE = Path(__file__).parents[2] / "recipes" / "manipulation.yaml"
SCENES = ["push | 0.05 0.62 0.02 -0.08 0.85 0.01", "push | -0.05 0.66 0.02 0.08 0.80 0.01"]
PIXELS = 16
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
ENCODER = {
    "source": "scratch",
    "architecture": "SiglipVisionModel",
    "config": {**TINY, "num_attention_heads": 2, "patch_size": 8},
}
DECODING = ChunkDecoding(temperature=1.0, max_steps=2)


def seeing(folder: Path, encoder: dict[str, Any] = ENCODER, pixels: int = PIXELS) -> Parameters:
    """Returns the robot recipe with a tiny policy that sees pictures and its hand."""
    content = parse_yaml(RECIPE.read_text())
    base = content["policy"]["base"]
    base["backbone"]["config"] |= {**TINY, "initializer_range": 0.3}
    base |= {"state": "hand", "vision": {"encoder": encoder, "pixels": pixels}}
    content["policy"]["scenes"]["at_once"] = 2
    (folder / "params.yaml").write_text(dump_yaml(content))
    return read_params(folder / "params.yaml")


def saved(folder: Path) -> Parameters:
    """Writes a fresh base policy to base/, all bins far from equally likely."""
    params = seeing(folder)
    model, tokenizer = make_action_model(params, folder)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=seeded())
    save_action_model(folder / "base", model, tokenizer)
    write_state(folder / "base", PolicyState(name="base"))
    return params


def test_a_policy_is_scored_on_the_pictures_that_it_saw(tmp_path: Path):
    params = saved(tmp_path)
    base = tmp_path / "base"
    policy = load_chunk_policy(params, base=base, directory=base, decoding=DECODING)
    with policy.scenes:
        trajectory, logp = policy.sample(SCENES, group_sizes=[2, 1], generator=seeded())
    player = MetaWorld(PIXELS)
    for rollout, scene in ((0, SCENES[0]), (2, SCENES[1])):
        first = int(trajectory.mask[:rollout].sum())
        observation = player.start(scene)
        np.testing.assert_array_equal(trajectory.picture[first], player.render())
        np.testing.assert_allclose(trajectory.observation[first], observation[:HAND], rtol=1e-6)
    kept = torch.tensor([False, True, True])
    packed = select_packed(policy.layout, trajectory.pack(logp), trajectory.group, kept)
    again, behavior = policy.unpack(packed, trajectory.group[kept])
    with torch.no_grad():
        torch.testing.assert_close(policy.log_prob(again), behavior, atol=1e-5, rtol=1e-5)
        blind = policy.log_prob(replace(again, picture=torch.zeros_like(again.picture)))
    assert (blind - behavior).abs().min() > 1e-3
    # An instruction of one word, a picture of 2 x 2 patches, the state, and what is decoded.
    widths = policy.widths(again, torch.tensor([0]), torch.tensor([[True, True]]))
    assert widths.tolist() == [2 * (1 + 4 + 1 + 1)]
    with pytest.raises(ArtifactError, match="picture must have 16 pixels to a side"):
        policy.unpack({**packed, "picture": packed["picture"][:, :, :8, :8]}, again.group)


def test_a_clone_acts_by_the_picture_alone():
    """Left where it is black and right where it is white: all else is the same."""
    torch.manual_seed(0)
    shape = {"observations": 1, "pixels": 8, "length": 2, "actions": 2, "bins": 5, "positions": 1}
    heads = {"num_attention_heads": 2}
    backbone = LlamaModel(LlamaConfig(vocab_size=9, **TINY, **heads, num_key_value_heads=2))
    vision = SiglipVisionModel(SiglipVisionConfig(**TINY, **heads, image_size=8, patch_size=4))
    model = ActionChunkModel(backbone, ChunkShape(**shape), vision)
    tokenizer = make_word_tokenizer(["go"])
    shown = [
        Demonstration(
            instruction="go",
            observation=np.zeros((6, 1)),
            action=np.full((6, 2), value),
            picture=np.full((6, 3, 8, 8), color, np.uint8),
            is_solved=True,
        )
        for value, color in ((-1.0, 0), (1.0, 255))
    ]
    settings = WarmupSettings(updates=60, rows_per_update=16, learning_rate=0.02, seed=0)
    how = CloningSettings(bin_spread=0.0, observation_noise=0.0)
    list(
        clone_demonstrations(
            model,
            lambda instructions: encode_instructions(tokenizer, instructions),
            shown,
            settings,
            how,
        )
    )
    words, mask = encode_instructions(tokenizer, ["go", "go"])
    pictures = torch.tensor(np.stack([each.picture[0] for each in shown]))
    with torch.no_grad():
        chosen = model(words, mask, torch.zeros(2, 1), pictures).argmax(dim=-1)
    assert chosen.tolist() == [[0] * 4, [4] * 4]
    # What the encoder has for other tasks is kept, and is nothing to train: it has no gradient.
    assert "eyes.head.probe" in dict(model.named_buffers())
    model(words, mask, torch.zeros(2, 1), pictures).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_an_expert_shows_what_it_sees():
    shown = demonstrate(SCENES[0], noise=0.0, seed=0, pixels=PIXELS)
    player = MetaWorld(PIXELS)
    player.start(SCENES[0])
    assert shown.picture.shape == (len(shown.action), 3, PIXELS, PIXELS)
    for picture, action in zip(shown.picture[:5], shown.action):
        np.testing.assert_array_equal(picture, player.render())
        player.step(action.tolist())
    assert (shown.picture[0] != shown.picture[-1]).any()


def test_what_cannot_see_is_refused_by_the_parameters_name(tmp_path: Path):
    with pytest.raises(ParameterError, match=r"must be a vision encoder .*, got 'NoModel'"):
        make_action_model(seeing(tmp_path, {**ENCODER, "architecture": "NoModel"}), tmp_path)
    words = {
        "source": "scratch",
        "architecture": "LlamaModel",
        "config": {**TINY, "num_attention_heads": 2},
    }
    with pytest.raises(ParameterError, match="must be a vision encoder, got LlamaModel"):
        make_action_model(seeing(tmp_path, words), tmp_path)
    config = SiglipVisionConfig(**ENCODER["config"], image_size=24)
    SiglipVisionModel(config).save_pretrained(tmp_path / "encoder")
    stored = {"source": "directory", "path": "encoder"}
    with pytest.raises(
        ParameterError, match=r"vision.pixels must be a size that the encoder accepts, got 16"
    ):
        make_action_model(seeing(tmp_path, stored), tmp_path)
    model, _ = make_action_model(seeing(tmp_path, stored, pixels=24), tmp_path)
    assert model.patches == 9
