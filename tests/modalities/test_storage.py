"""Policy directories: everything to sample from and to continue, for full weights and adapters."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.errors import ArtifactError, MissingExtraError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import (
    ADAPTER,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    PolicyState,
    files_for_sampling,
    gather_trained,
    read_state,
    read_trainable,
    save_base,
    save_trained,
    trainable,
    whole_policy,
)
from grpo.modalities.shared.optimizer import optimized_tensors
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts import tensors
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.types import Cost
from grpo.wiring.policies import load_policy, load_sampler, make_optimizer
from tests.modalities.tiny import seeded, tiny_policy

PARAMS = read_params(Path(__file__).parents[2] / "params.yaml")
DECODING = Decoding(temperature=1.0, max_steps=4)
TRAINING = PARAMS.arms["sgpo"].training
LORA = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_proj"])


def with_lora(lora: Lora | None) -> Parameters:
    policy = PARAMS.policy.model_copy(update={"lora": lora})
    return PARAMS.model_copy(update={"policy": policy})


def load(params: Parameters, base: Path, directory: Path) -> TokenPolicy:
    return load_policy(params, base=base, directory=directory, draws=DECODING)


def take_steps(policy: TokenPolicy, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Raises the probability of one fixed trajectory."""
    trajectory, _ = policy.sample(["a=", "b="], group_sizes=[2, 2], generator=seeded())
    for _ in range(count):
        optimizer.zero_grad()
        (-policy.log_prob(trajectory).sum()).backward()
        optimizer.step()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    policy = tiny_policy()
    save_base(tmp_path / "base", policy.model, policy.tokenizer)
    return tmp_path / "base"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="needs vllm to be absent")
def test_a_sampler_that_is_not_installed_says_what_to_do(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GRPO_VLLM_PYTHON", raising=False)
    policy = PARAMS.policy.model_copy(update={"sampler": "vllm"})
    params = PARAMS.model_copy(update={"policy": policy})
    with pytest.raises(MissingExtraError, match=r"policy\.sampler vllm needs vllm; run pip"):
        load_sampler(params, base=base, directory=base, draws=DECODING)


@pytest.mark.parametrize(
    ("lora", "dtype", "part_bytes"),
    [
        (None, "float32", tensors.PART_BYTES),
        (LORA, "float32", tensors.PART_BYTES),
        (None, "bfloat16", tensors.PART_BYTES),
        (None, "bfloat16", 5000),
    ],
    ids=["full", "lora", "bfloat16", "in parts"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trained_policy_continues_as_if_never_stored(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: Lora | None,
    dtype: str,
    part_bytes: int,
):
    """Weights, the copies that are master_weight, and Adam's moments come back to the last bit."""
    monkeypatch.setattr(tensors, "PART_BYTES", part_bytes)
    machine = PARAMS.machine.model_copy(update={"dtype": dtype})
    params = with_lora(lora).model_copy(update={"machine": machine})
    policy = load(params, base, base)
    optimizer = make_optimizer(policy.model, TRAINING)
    take_steps(policy, optimizer, 3)
    state = PolicyState(name="r-1", arm="a", start="base", updates=3, cost=Cost(flops=5))
    save_trained(tmp_path / "r-1", gather_trained(policy.model, optimizer), state)
    take_steps(policy, optimizer, 2)

    again = load(params, base, tmp_path / "r-1")
    restored = make_optimizer(again.model, TRAINING)
    read_trainable(tmp_path / "r-1", again.model, restored)
    take_steps(again, restored, 2)
    for ours, theirs in zip(optimized_tensors(restored), optimized_tensors(optimizer), strict=True):
        assert torch.equal(ours, theirs)
    expected = trainable(policy.model)
    for name, tensor in trainable(again.model).items():
        assert torch.equal(tensor, expected[name]), name
    assert read_state(tmp_path / "r-1", "r-1") == state
    assert (tmp_path / "r-1" / ADAPTER).exists() == (lora is not None)
    assert (tmp_path / "r-1" / OPTIMIZER).exists() == (part_bytes != 5000)
    for_sampling = {each.name for each in files_for_sampling(tmp_path / "r-1")}
    assert STATE in for_sampling
    assert not any(each.startswith("optimizer") for each in for_sampling)


def test_large_tensors_are_divided_into_files_that_the_index_names(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also as vLLM and transformers read them."""
    policy = load(PARAMS, base, base)
    monkeypatch.setattr(tensors, "PART_BYTES", 5000)
    out = tmp_path / "r-1"
    weights = gather_trained(policy.model, make_optimizer(policy.model, TRAINING))
    save_trained(out, weights, PolicyState(name="r-1", arm="a", start="base"))
    parts = sorted(out.glob("model-*.safetensors"))
    assert len(parts) > 2
    index = out / f"{WEIGHTS}.index.json"
    assert sorted(set(read_json(index)["weight_map"].values())) == [each.name for each in parts]
    largest = max(each.nbytes for each in policy.model.parameters())
    assert max(each.stat().st_size for each in parts) < max(5000, largest) + 2000
    with whole_policy(out, base) as whole:
        model = AutoModelForCausalLM.from_pretrained(whole)
    for name, each in policy.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], each), name

    name, file = next(iter(read_json(index)["weight_map"].items()))
    for wrong in (
        {},
        {"weight_map": {name: f"../{file}"}},
        {"weight_map": {f"another {name}": file}},
    ):
        write_json(tmp_path / "wrong" / index.name, wrong)
        for each in parts:
            shutil.copy(each, tmp_path / "wrong")
        with pytest.raises(ArtifactError, match=r"index\.json: must name .*; rerun its stage"):
            read_trainable(tmp_path / "wrong", policy.model, optimizer=None)
    parts[1].unlink()
    with pytest.raises(ArtifactError, match=rf"{parts[1].name}: no such file"):
        read_trainable(out, policy.model, optimizer=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(base: Path):
    plain, adapted = load(PARAMS, base, base), load(with_lora(LORA), base, base)
    trajectory, logp = plain.sample(["a=", "b="], group_sizes=[2, 2], generator=seeded())
    with torch.no_grad():
        torch.testing.assert_close(adapted.log_prob(trajectory), logp, atol=2e-5, rtol=1e-5)
    assert all("lora" in name for name in trainable(adapted.model))
    assert adapted.flops.training.body < plain.flops.training.body  # no gradient of frozen weights


def test_what_is_no_policy_is_named(base: Path, tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"config.json: no such file"):
        load(PARAMS, tmp_path, tmp_path)
    with pytest.raises(ArtifactError, match=r"model.safetensors: no such file"):
        load(PARAMS, base, tmp_path)
    (base / WEIGHTS).write_bytes((base / WEIGHTS).read_bytes()[:100])
    with pytest.raises(ArtifactError, match="must be a complete policy directory"):
        load(PARAMS, base, base)
    (base / "state.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"state\.json"):
        read_state(base, "base")
