"""Chunked policies from parameters: imported backbones, adapters, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from grpo.errors import ParameterError
from grpo.modalities.action_chunks import policy as chunk_policy
from grpo.modalities.action_chunks.bases import make_action_model
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import save_action_model
from grpo.modalities.action_chunks.policy import ActionChunkPolicy, load_chunk_policy
from grpo.modalities.shared.directories import (
    PolicyState,
    gather_trained,
    save_trained,
    trainable,
    write_state,
)
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.params.parameters import Parameters, read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.wiring.policies import load_sampler, make_optimizer

RECIPE = Path(__file__).parents[2] / "recipes" / "manipulation.yaml"
LORA = {"rank": 2, "alpha": 2, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
GREEDY = ChunkDecoding(temperature=1.0, max_steps=2)


def changed(tmp_path: Path, **policy: Any) -> Parameters:
    """Returns the recipe with other parts of its policy; `backbone` is within `base`."""
    content = parse_yaml(RECIPE.read_text())
    backbone = policy.pop("backbone", None)
    content["policy"] |= policy
    if backbone is not None:
        content["policy"]["base"]["backbone"] = backbone
    else:
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        content["policy"]["base"]["backbone"]["config"] |= small
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    return read_params(tmp_path / "params.yaml")


def logits_of(policy: ActionChunkPolicy) -> torch.Tensor:
    words = torch.tensor([[2, 3]])
    with torch.no_grad():
        logits: torch.Tensor = policy.model(words, words > 0, torch.ones(1, 39))
    return logits


def test_adapters_and_heads_are_trained_and_the_backbone_stays(tmp_path: Path):
    params = changed(tmp_path, lora=LORA)
    model, tokenizer = make_action_model(params, tmp_path)
    base, out = tmp_path / "base", tmp_path / "out"
    save_action_model(base, model, tokenizer)
    write_state(base, PolicyState(name="base"))
    policy = load_chunk_policy(params, base=base, directory=base, decoding=GREEDY)
    fresh = logits_of(policy)
    names = trainable(policy.model).keys()
    assert {name.split(".")[0] for name in names} == {"backbone", "state", "queries", "head"}
    assert all("lora" in name for name in names if name.startswith("backbone"))
    optimizer = make_optimizer(policy.model, params.arms["all"].training)
    for each in trainable(policy.model).values():
        each.grad = torch.ones_like(each)
    optimizer.step()
    state = PolicyState(name="all-1", arm="all")
    save_trained(out, gather_trained(policy.model, optimizer), state)
    assert not (out / "model.safetensors").exists()
    again = load_chunk_policy(params, base=base, directory=out, decoding=GREEDY)
    assert torch.equal(logits_of(again), logits_of(policy))
    assert not torch.equal(fresh, logits_of(policy))


@pytest.mark.parametrize(("policies_per_host", "processes"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_policies_of_a_host_share_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies_per_host: int, processes: int
):
    """Of four, on which each plays its scenes."""
    monkeypatch.setattr(chunk_policy, "_available_cores", lambda: 4)
    params = changed(tmp_path)
    model, tokenizer = make_action_model(params, tmp_path)
    save_action_model(tmp_path / "base", model, tokenizer)
    policy = load_sampler(
        params,
        base=tmp_path / "base",
        directory=tmp_path / "base",
        draws=GREEDY,
        policies_per_host=policies_per_host,
    )
    assert len(policy.scenes._workers) == processes


def test_a_backbone_is_imported_with_its_tokenizer(tmp_path: Path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    imported = LlamaModel(config)
    imported.save_pretrained(tmp_path / "data" / "own")
    make_word_tokenizer(["door open push"]).save_pretrained(tmp_path / "data" / "own")
    params = changed(tmp_path, backbone={"source": "directory", "path": "own"})
    model, tokenizer = make_action_model(params, tmp_path / "data")
    for name, each in imported.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], each), name
    assert tokenizer(["push door"])["input_ids"] == [[4, 2]]
    with pytest.raises(ParameterError, match=r"policy.base.backbone.path must be a directory"):
        make_action_model(params, tmp_path)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (("LlamaForCausalLM", {}), r"architecture must be a class of transformers without a head"),
        (("NoModel", {}), r"architecture must be a class of transformers without a head"),
        (("LlamaModel", {"hidden_size": 15}), r"policy.base.backbone.config is refused"),
    ],
)
def test_a_backbone_that_cannot_be_made_is_refused(
    tmp_path: Path, backbone: tuple[str, dict[str, int]], message: str
):
    architecture, config = backbone
    wanted = {
        "source": "scratch",
        "architecture": architecture,
        "config": {"num_attention_heads": 4, **config},
    }
    with pytest.raises(ParameterError, match=message):
        make_action_model(changed(tmp_path, backbone=wanted), tmp_path)


WRONG = {
    "chunk.positions must divide chunk.length 8, got 3": ("base", "chunk", "positions", 3),
    r"max_steps times chunk.length must be at most 500, got 504": ("max_steps", 63),
    "demonstrations must name the families of the task": (
        "base",
        "warmup",
        "demonstrations",
        {"push-v3": 1},
    ),
    "policy.phases must be 'gripper' or 'time'": ("phases", "moon"),
    "policy.scenes.at_once must be at most 4096": ("scenes", "at_once", 10**9),
    "policy.scenes.timeout_seconds must be at least 0.1": (
        "scenes",
        "timeout_seconds",
        1e-9,
    ),
    "policy.scenes.timeout_seconds must be at most 86400": (
        "scenes",
        "timeout_seconds",
        1e30,
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_parameters_end_in_one_line(tmp_path: Path, message: str):
    content = parse_yaml(RECIPE.read_text())
    *path, last, value = WRONG[message]
    target = content["policy"]
    for each in path:
        target = target[each]
    target[last] = value
    file = tmp_path / "params.yaml"
    file.write_text(dump_yaml(content))
    with pytest.raises(ParameterError, match=message) as found:
        read_params(file)
    assert str(found.value).startswith(f"{file}: ")
    assert "\n" not in str(found.value)


def test_a_judge_of_another_kind_is_refused(tmp_path: Path):
    content = parse_yaml(RECIPE.read_text())
    content["reward"] |= {"answer_pattern": "(.*)", "timeout_seconds": 1.0}
    content["reward"]["judges"][0]["judge"] = "math"
    file = tmp_path / "params.yaml"
    file.write_text(dump_yaml(content))
    with pytest.raises(
        ParameterError,
        match=r"reward.judges\[0\].judge must be one of .*simulator.* with policy.kind action_ch",
    ):
        read_params(file)
