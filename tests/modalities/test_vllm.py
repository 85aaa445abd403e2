"""Sampling by real vLLM engines on a CPU, compared with the trainer's model."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from grpo.errors import ArtifactError, MissingExtraError, ParameterError, WorkerError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import offer_weights, save_base, trainable
from grpo.modalities.tokens.modality import VllmParams
from grpo.modalities.tokens.policy import TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.vllm import PYTHON, VllmPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.wiring.policies import load_policy, load_sampler
from tests.modalities.drawn import (
    LORA,
    PROMPTS,
    SIZES,
    TOLERANCE,
    assert_rollouts_end_with_their_first_end_token,
    assert_same,
    decoding,
    draw,
    largest_difference,
)
from tests.modalities.tiny import seeded, tiny_policy
from tests.vllm_python import require_vllm

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PARAMS = read_params(ROOT / "params.yaml")
SETTINGS = VllmParams(
    tensor_parallel_size=1, memory_share=0.02, prefix_caching=True, compiled=False
)


@pytest.fixture(scope="module", autouse=True)
def _python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        require_vllm(monkeypatch)
        yield


def model_of(seed: int = 0, head_dim: int = 32) -> TokenPolicy:
    """Returns a model with a tied output layer, whose weights an engine packs."""
    return tiny_policy(
        seed=seed, head_dim=head_dim, tie_word_embeddings=True, max_position_embeddings=256
    )


def write_base(directory: Path, policy: TokenPolicy) -> Path:
    save_base(directory, policy.model, policy.tokenizer)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("policies") / "base", model_of())


def params_of(settings: VllmParams | None = SETTINGS, lora: Lora | None = None) -> Parameters:
    changes = {"sampler": "vllm", "vllm": settings, "lora": lora}
    return PARAMS.model_copy(update={"policy": PARAMS.policy.model_copy(update=changes)})


def engine_on(base: Path, **changes: Any) -> VllmPolicy:
    settings = SETTINGS.model_copy(update=changes)
    return sampler_of(params_of(settings), base)


def sampler_of(params: Parameters, base: Path) -> VllmPolicy:
    policy = load_sampler(params, base=base, directory=base, draws=decoding())
    assert isinstance(policy, VllmPolicy)
    return policy


@pytest.fixture(scope="module")
def shared_engine(base: Path) -> Iterator[VllmPolicy]:
    policy = engine_on(base)
    yield policy
    policy.engine.stop()


@pytest.fixture
def engine(shared_engine: VllmPolicy, base: Path) -> VllmPolicy:
    """An engine with the weights of the base; tests share its process."""
    shared_engine.decoding = decoding()
    shared_engine.end_tokens = model_of().end_tokens
    shared_engine.load_weights(base / "model.safetensors")
    return shared_engine


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer_at_the_same_temperature(
    engine: VllmPolicy, temperature: float
):
    engine.decoding = decoding(temperature)
    drawn = draw(engine)
    assert largest_difference(drawn, model_of(), decoding(temperature)) < TOLERANCE
    assert largest_difference(drawn, model_of(), decoding(temperature * 1.1)) > 10 * TOLERANCE


def test_tokens_are_drawn_by_the_probabilities_of_the_trainer(engine: VllmPolicy):
    """Of the most likely first tokens, within five standard errors."""
    rollouts, trainer = 1500, model_of()
    engine.decoding = trainer.decoding = decoding(1.3, max_steps=1)
    trajectory, _ = draw(engine, ["2 + 2 ="], [rollouts])
    count = trajectory.tokens[:, 0].bincount(minlength=trainer.model.config.vocab_size)
    likely = count.topk(5).indices
    one_each = TokenTrajectory(
        group=torch.zeros(5, dtype=torch.long),
        prompt=trajectory.prompt,
        prompt_mask=trajectory.prompt_mask,
        tokens=likely[:, None],
        mask=torch.ones(5, 1, dtype=torch.bool),
    )
    with torch.no_grad():
        chance = trainer.log_prob(one_each)[:, 0].exp()
    error = (chance * (1 - chance) / rollouts).sqrt()
    assert bool(((count[likely] / rollouts - chance).abs() < 5 * error).all())


def test_greedy_decoding_takes_the_most_likely_token(engine: VllmPolicy):
    engine.decoding = decoding(0.0)
    trajectory, logp = draw(engine)
    ours = model_of()
    ours.decoding = decoding(0.0)
    expected, expected_logp = ours.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert torch.equal(trajectory.tokens, expected.tokens)
    torch.testing.assert_close(logp, expected_logp, rtol=0.0, atol=TOLERANCE)


def test_a_rollout_ends_with_its_first_end_token(engine: VllmPolicy):
    assert_rollouts_end_with_their_first_end_token(engine)


def test_the_same_seed_draws_the_same_rollouts(engine: VllmPolicy):
    drawn = draw(engine)
    assert_same(drawn, draw(engine))
    assert not torch.equal(drawn[0].tokens, draw(engine, seed=1)[0].tokens)


def test_prompts_that_exceed_a_step_of_the_scheduler_are_read_whole(engine: VllmPolicy):
    """vLLM undoes the draws of a prompt that it has read in part, which no CPU can."""
    prompts = [chr(97 + index) * 240 for index in range(24)]
    drawn = draw(engine, prompts, [2] * 24)
    assert int(drawn[0].prompt_mask.sum()) > 4096
    assert largest_difference(drawn, model_of(), decoding()) < TOLERANCE


def test_a_group_has_as_many_rollouts_as_it_asks_for_and_they_differ(engine: VllmPolicy):
    trajectory, _ = draw(engine)
    assert trajectory.group.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert len(torch.unique(trajectory.tokens, dim=0)) == len(trajectory.group)
    expected, mask = engine.encode(PROMPTS)
    assert torch.equal(trajectory.prompt[mask], expected[mask])
    assert engine.cost.sampled_steps > 0


def repeating_weights(policy: TokenPolicy) -> dict[str, torch.Tensor]:
    """Returns weights that repeat the last token of a prompt with a probability of 1.

    Without attention and MLP, a logit is the product of two rows of the embedding, which is also
    the output layer. Rows have one length, so that the largest product is that of equal rows.
    """
    weights = {name: each.detach().clone() for name, each in trainable(policy.model).items()}
    for name, each in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            each.zero_()
    rows = weights["model.embed_tokens.weight"]
    rows.mul_(40 / rows.norm(dim=1, keepdim=True).clamp(min=1.0))  # the row of the padding is 0
    return weights


def test_an_update_of_the_weights_needs_no_other_process(
    engine: VllmPolicy, tmp_path: Path, base: Path
):
    """Also of an output layer that is tied to the embedding; and prefixes are read again."""
    before, process = draw(engine), engine.engine.process_id
    save_file(repeating_weights(model_of()), tmp_path / "model.safetensors")
    engine.load_weights(tmp_path / "model.safetensors")
    trajectory, logp = draw(engine)
    last = trajectory.prompt[trajectory.group, -1]
    assert torch.equal(trajectory.tokens, last[:, None].expand_as(trajectory.tokens))
    assert float(logp.min()) > -1e-6
    engine.load_weights(base / "model.safetensors")
    assert_same(before, draw(engine))
    assert engine.engine.process_id == process


def test_an_update_invalidates_cached_prefixes(engine: VllmPolicy, tmp_path: Path):
    """The prompt fills a block of the cache, with the keys and values of the weights before."""
    draw(engine)
    trainer = model_of(seed=5)
    save_file(trainable(trainer.model), tmp_path / "model.safetensors")
    engine.load_weights(tmp_path / "model.safetensors")
    assert largest_difference(draw(engine), trainer, decoding()) < TOLERANCE


def test_the_memory_of_loaded_weights_can_be_written_again(engine: VllmPolicy):
    trainers = [model_of(seed=seed) for seed in (5, 6)]
    shared = offer_weights(trainers[0].model, None)
    assert shared
    engine.load_weights(shared.path)
    drawn = draw(engine)
    assert offer_weights(trainers[1].model, shared) is shared
    assert_same(drawn, draw(engine))
    engine.load_weights(shared.path)
    assert largest_difference(draw(engine), trainers[1], decoding()) < TOLERANCE


def test_weights_of_another_model_are_refused(engine: VllmPolicy, tmp_path: Path):
    weights = dict(list(trainable(model_of().model).items())[1:])
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="belongs to another model"):
        engine.load_weights(tmp_path / "model.safetensors")


def test_an_engine_wakes_with_the_weights_that_it_gets(engine: VllmPolicy, base: Path):
    drawn = draw(engine)
    engine.sleep()
    engine.load_weights(base / "model.safetensors")
    assert_same(drawn, draw(engine))


def test_draws_do_not_depend_on_prefix_caching(engine: VllmPolicy, base: Path):
    cached = [draw(engine) for _ in range(2)]  # the second reads the prefix from the cache
    without = engine_on(base, prefix_caching=False)
    assert without.engine.received["prefix_caching"] is False
    assert engine.engine.received["prefix_caching"] is True
    for drawn in cached:
        assert_same(drawn, draw(without), TOLERANCE)
    without.engine.stop()


def test_a_prompt_that_leaves_no_room_is_refused_in_one_line(engine: VllmPolicy):
    with pytest.raises(ParameterError, match=r"policy\.max_steps: a prompt of 301 tokens .* 256"):
        draw(engine, ["x" * 300], [1])


def test_an_engine_has_adapters_merged_into_its_weights(base: Path, tmp_path: Path):
    params = params_of(lora=LORA)
    trainer = load_policy(params, base=base, directory=base, draws=decoding(0.7))
    sampler = sampler_of(params, base)
    sampler.decoding = decoding(0.7)
    assert largest_difference(draw(sampler), trainer, decoding(0.7)) < TOLERANCE
    adapters = trainable(trainer.model)
    with torch.no_grad():
        for each in adapters.values():  # those named lora_B start at 0
            each.normal_(0.0, 0.2, generator=seeded())
    save_file(adapters, tmp_path / "adapter.safetensors")
    sampler.load_weights(tmp_path / "adapter.safetensors")
    drawn = draw(sampler)
    assert largest_difference(drawn, trainer, decoding(0.7)) < TOLERANCE
    assert largest_difference(drawn, model_of(), decoding(0.7)) > 10 * TOLERANCE
    sampler.engine.stop()


def test_a_killed_engine_is_started_again_and_draws_the_same(engine: VllmPolicy, tmp_path: Path):
    """During a request, with the weights of the last update."""
    save_file(trainable(model_of(seed=5).model), tmp_path / "model.safetensors")
    engine.load_weights(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()  # as that of a worker on another host
    engine.decoding = decoding(max_steps=90)
    sizes, process = [30, 30, 30], engine.engine.process_id
    drawn = draw(engine, sizes=sizes)
    os.kill(process, signal.SIGSTOP)  # so that it cannot answer before it is killed
    Timer(0.5, os.kill, (process, signal.SIGKILL)).start()
    assert_same(drawn, draw(engine, sizes=sizes), TOLERANCE)
    assert engine.engine.process_id != process


def test_an_engine_that_is_lost_again_ends_in_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sampler = engine_on(base)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(broken))
    os.kill(sampler.engine.process_id, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"lost while it started \(exit code 3\).*memory_share"):
        draw(sampler)


START = """
import sys, time
from grpo.modalities.tokens.vllm import Engine
engine = Engine({settings!r}, threads=1)
print(engine.process_id, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_with_a_killed_parent(base: Path):
    settings = {**SETTINGS.model_dump(), "directory": str(base), "dtype": "float32"}
    code = START.format(settings=settings)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    psutil.wait_procs([engine], timeout=10)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_an_engine_of_two_ranks_draws_the_same(engine: VllmPolicy, base: Path, tmp_path: Path):
    """On a CPU, ranks are processes. The weights are updated in both."""
    both = engine_on(base, tensor_parallel_size=2, memory_share=0.01)
    received, alone = both.engine.received, engine.engine.received
    assert received["tensor_parallel_size"] == 2
    assert received["kv_cache_memory_bytes"] < alone["kv_cache_memory_bytes"] / 2
    assert_same(draw(engine), draw(both), TOLERANCE)
    trainer = model_of(seed=5)
    save_file(trainable(trainer.model), tmp_path / "model.safetensors")
    both.load_weights(tmp_path / "model.safetensors")
    assert largest_difference(draw(both), trainer, decoding()) < TOLERANCE
    both.engine.stop()


@pytest.mark.parametrize(
    ("head_dim", "changes", "why"),
    [
        (24, {}, "head"),
        (32, {"tensor_parallel_size": 3}, "divisible by tensor parallel size"),
        (32, {"memory_share": 1e-9}, "memory_share 1e-09 of the free memory is less than"),
    ],
    ids=["head size", "ranks", "memory"],
)
def test_what_vllm_refuses_is_said_in_one_line(
    tmp_path: Path, head_dim: int, changes: dict[str, Any], why: str
):
    base = write_base(tmp_path / "base", model_of(head_dim=head_dim))
    with pytest.raises(ParameterError, match=r"policy\.sampler vllm: vLLM refuses to ") as caught:
        draw(engine_on(base, **changes))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_python_that_cannot_be_run_is_named(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PYTHON, "/no/python")
    with pytest.raises(MissingExtraError, match=r"GRPO_VLLM_PYTHON: must name .*'/no/python'"):
        engine_on(base)
