"""Sampling by a real vLLM server on a CPU, compared with the trainer's model."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo.errors import ParameterError, RefusedError, UnsoundError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import save_base, trainable
from grpo.modalities.tokens.modality import VllmServerParams
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.objective.algorithms import grpo, rloo
from grpo.params.parameters import Parameters, read_params
from grpo.training.frozen import require_range_above
from grpo.wiring.policies import load_policy, load_sampler
from tests.modalities.drawn import (
    LORA,
    PROMPTS,
    SIZES,
    TOLERANCE,
    Drawn,
    assert_rollouts_end_with_their_first_end_token,
    assert_same,
    decoding,
    draw,
    largest_difference,
)
from tests.modalities.tiny import seeded, tiny_policy
from tests.vllm_python import require_vllm
from tests.vllm_servers import VllmServer, vllm_server

pytestmark = pytest.mark.long

PARAMS = read_params(Path(__file__).parents[2] / "params.yaml")
KEY = "token-of-a-test"
# Filters that a server without other orders takes from the model's directory.
FILTERS = {"top_k": 3, "top_p": 0.5, "temperature": 0.2, "repetition_penalty": 1.5}


def model_of(seed: int = 0) -> TokenPolicy:
    return tiny_policy(seed=seed, head_dim=32, max_position_embeddings=256)


def write_base(directory: Path, policy: TokenPolicy) -> Path:
    save_base(directory, policy.model, policy.tokenizer)
    config = directory / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **FILTERS}))
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("policies") / "base", model_of())


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[VllmServer]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        require_vllm(monkeypatch)
        monkeypatch.setenv("SAMPLER_KEY", KEY)
        with vllm_server(base, "--api-key", KEY) as running:
            yield running


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the server and its samplers see."""
    return tmp_path_factory.getbasetemp()


def params_of(server: VllmServer, shared: Path, *, lora: Lora | None = None) -> Parameters:
    settings = VllmServerParams(
        url=server.url,
        key_variable="SAMPLER_KEY",
        concurrency=32,
        timeout_seconds=120.0,
        retries=10,
        retry_seconds=1.0,
        directory=str(shared),
    )
    changes = {"sampler": "vllm_server", "server": settings, "lora": lora}
    return PARAMS.model_copy(update={"policy": PARAMS.policy.model_copy(update=changes)})


def sampler_of(params: Parameters, base: Path) -> TokenPolicy:
    policy = load_sampler(params, base=base, directory=base, draws=decoding())
    assert isinstance(policy, TokenPolicy)
    return policy


@pytest.fixture
def sampler(server: VllmServer, shared: Path, base: Path) -> TokenPolicy:
    return sampler_of(params_of(server, shared), base)


def save_weights(policy: TokenPolicy, path: Path) -> Path:
    save_file(trainable(policy.model), path)
    return path


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer_at_the_same_temperature(
    sampler: TokenPolicy, temperature: float
):
    """Without the filters in the model's generation_config.json."""
    sampler.decoding = decoding(temperature)
    drawn = draw(sampler, sizes=[20, 20, 20])
    assert largest_difference(drawn, model_of(), decoding(temperature)) < TOLERANCE
    assert largest_difference(drawn, model_of(), decoding(temperature + 0.3)) > 10 * TOLERANCE
    first = drawn[0].tokens[:20, 0]
    assert len(first.unique()) > FILTERS["top_k"]


def test_greedy_decoding_takes_the_most_likely_token(sampler: TokenPolicy):
    sampler.decoding = decoding(0.0)
    ours = model_of()
    ours.decoding = decoding(0.0)
    expected = ours.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert_same(draw(sampler), expected, TOLERANCE)


def test_a_rollout_ends_with_its_first_end_token(sampler: TokenPolicy):
    assert_rollouts_end_with_their_first_end_token(sampler)


def test_the_same_seed_draws_the_same_rollouts(sampler: TokenPolicy):
    drawn = draw(sampler)
    assert_same(drawn, draw(sampler), TOLERANCE)
    assert not torch.equal(drawn[0].tokens, draw(sampler, seed=1)[0].tokens)
    assert len(torch.unique(drawn[0].tokens, dim=0)) == sum(SIZES)


def test_an_update_replaces_the_weights_and_what_is_cached_of_prompts(
    sampler: TokenPolicy, tmp_path: Path
):
    """The last prompt fills a block of the cache, with keys and values of the weights before."""
    drawn = draw(sampler)
    assert largest_difference(drawn, model_of()) < TOLERANCE
    other = model_of(seed=5)
    sampler.load_weights(save_weights(other, tmp_path / "model.safetensors"))
    drawn = draw(sampler)
    assert largest_difference(drawn, other) < TOLERANCE
    assert largest_difference(drawn, model_of()) > 10 * TOLERANCE


def test_samplers_of_different_policies_share_a_server(
    server: VllmServer, shared: Path, base: Path, tmp_path: Path
):
    """At the same time; each gets the rollouts of its own weights."""
    bases = [base, write_base(tmp_path / "other", model_of(seed=5))]
    samplers = [sampler_of(params_of(server, shared), each) for each in bases]

    def draw_often(sampler: TokenPolicy) -> list[Drawn]:
        return [draw(sampler, seed=seed) for seed in range(4)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(draw_often, samplers))
    for drawn, seed in zip(found, (0, 5)):
        differences = [largest_difference(each, model_of(seed)) for each in drawn]
        assert max(differences) < TOLERANCE


def test_adapters_are_merged_into_the_weights(
    server: VllmServer, shared: Path, base: Path, tmp_path: Path
):
    params = params_of(server, shared, lora=LORA)
    trainer = load_policy(params, base=base, directory=base, draws=decoding())
    assert isinstance(trainer, TokenPolicy)
    sampler = sampler_of(params, base)
    assert largest_difference(draw(sampler), trainer) < TOLERANCE
    with torch.no_grad():
        for each in trainable(trainer.model).values():  # those named lora_B start at 0
            each.normal_(0.0, 0.2, generator=seeded())
    sampler.load_weights(save_weights(trainer, tmp_path / "adapter.safetensors"))
    drawn = draw(sampler)
    assert largest_difference(drawn, trainer) < TOLERANCE
    assert largest_difference(drawn, model_of()) > 10 * TOLERANCE


def test_a_server_whose_weights_another_program_replaces_is_found_by_the_trainer(
    server: VllmServer, sampler: TokenPolicy, tmp_path: Path
):
    """Without a new version; rule U27 stops the round before its first update."""
    drawn = draw(sampler)
    require_range_above(largest_difference(drawn, model_of()), grpo())
    save_weights(model_of(seed=5), tmp_path / "model.safetensors")
    path = {"weights_path": str(tmp_path)}
    done = server.ask("/collective_rpc", {"method": "reload_weights", "kwargs": path})
    assert done.status == 200
    drift = largest_difference(draw(sampler), model_of())
    for objective in (grpo(), rloo()):
        with pytest.raises(UnsoundError, match=r"U27: .* at a drift of .*; .*holds other weights"):
            require_range_above(drift, objective)
    server.ask("/update_weight_version", {"new_version": "of a test"})  # the next test loads again


def test_a_prompt_that_leaves_no_room_is_refused_in_one_line(sampler: TokenPolicy):
    with pytest.raises(ParameterError, match=r"policy\.max_steps: a prompt of 301 tokens .* 256"):
        draw(sampler, ["x" * 300], [1])


def test_a_wrong_key_is_refused_without_the_key(
    sampler: TokenPolicy, server: VllmServer, shared: Path, base: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("SAMPLER_KEY", "another-key")
    stranger = sampler_of(params_of(server, shared), base)
    with pytest.raises(RefusedError, match=r"HTTP 401 .*; start vLLM's server as") as caught:
        draw(stranger)
    assert "another-key" not in str(caught.value)


def test_a_server_that_is_killed_and_started_again_gets_the_weights_and_draws_the_same(
    server: VllmServer, sampler: TokenPolicy, tmp_path: Path
):
    """The new one starts with other weights than those of the last update."""
    other = model_of(seed=5)
    sampler.load_weights(save_weights(other, tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()  # as that of a worker on another host
    sampler.decoding = decoding(max_steps=90)
    sizes = [30, 30, 30]
    expected = draw(sampler, sizes=sizes)
    os.killpg(server.process.pid, signal.SIGSTOP)  # so that it cannot answer before it is killed
    restart = threading.Timer(0.5, lambda: (server.kill(), server.start()))
    restart.start()
    drawn = draw(sampler, sizes=sizes)
    restart.join()
    assert_same(drawn, expected, TOLERANCE)
    assert largest_difference(drawn, other, decoding(max_steps=90)) < TOLERANCE
