"""Policy directories: everything to sample from and to continue, for full weights and adapters."""

import importlib.util
from pathlib import Path

import pytest
import torch

from grpo.errors import ArtifactError, MissingExtraError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import (
    ADAPTER,
    WEIGHTS,
    PolicyState,
    gather_trained,
    read_state,
    read_trainable,
    save_base,
    save_trained,
    trainable,
)
from grpo.modalities.shared.optimizer import optimized_tensors
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.types import Cost
from grpo.wiring.policies import load_policy, load_sampler, make_optimizer
from tests.modalities.tiny import seeded, tiny_policy

PARAMS = read_params(Path(__file__).parents[2] / "params.yaml")
DECODING = Decoding(temperature=1.0, max_steps=4)
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
def test_a_sampler_that_is_not_installed_says_what_to_do(base: Path):
    policy = PARAMS.policy.model_copy(update={"sampler": "vllm"})
    params = PARAMS.model_copy(update={"policy": policy})
    with pytest.raises(MissingExtraError, match=r"policy\.sampler vllm needs vllm; run pip"):
        load_sampler(params, base=base, directory=base, draws=DECODING)


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(None, "float32"), (LORA, "float32"), (None, "bfloat16")],
    ids=["full", "lora", "bfloat16"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trained_policy_continues_as_if_never_stored(
    base: Path, tmp_path: Path, lora: Lora | None, dtype: str
):
    """Weights, the copies that are master_weight, and Adam's moments come back to the last bit."""
    machine = PARAMS.machine.model_copy(update={"dtype": dtype})
    params = with_lora(lora).model_copy(update={"machine": machine})
    training = PARAMS.arms["sgpo"].training
    policy = load(params, base, base)
    optimizer = make_optimizer(policy.model, training)
    take_steps(policy, optimizer, 3)
    state = PolicyState(name="r-1", arm="a", start="base", updates=3, cost=Cost(flops=5))
    save_trained(tmp_path / "r-1", gather_trained(policy.model, optimizer), state)
    take_steps(policy, optimizer, 2)

    again = load(params, base, tmp_path / "r-1")
    restored = make_optimizer(again.model, training)
    read_trainable(tmp_path / "r-1", again.model, restored)
    take_steps(again, restored, 2)
    for ours, theirs in zip(optimized_tensors(restored), optimized_tensors(optimizer), strict=True):
        assert torch.equal(ours, theirs)
    expected = trainable(policy.model)
    for name, tensor in trainable(again.model).items():
        assert torch.equal(tensor, expected[name]), name
    assert read_state(tmp_path / "r-1", "r-1") == state
    assert (tmp_path / "r-1" / ADAPTER).exists() == (lora is not None)


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
