"""The estimates of docs/scale.md against real models, directories and closed forms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.scale import inputs, measure, results, work
from grpo.advice.prediction import packed_flops
from grpo.modalities.shared.directories import (
    OPTIMIZER,
    WEIGHTS,
    gather_trained,
    trainable,
    write_trained,
)
from grpo.modalities.shared.flops import TokenFlops
from grpo.modalities.shared.optimizer import optimized_tensors
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.params.parameters import read_params
from grpo.training.batches import pack_microbatches
from grpo.wiring.policies import make_optimizer

SPEC: dict[str, Any] = {
    "architecture": "Qwen3ForCausalLM",
    "config": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
}
RUN = inputs.Run(
    gpus=1,
    prompts_per_iteration=6,
    rollouts_per_group=4,
    prompt_tokens=5,
    mean_steps=8,
    max_steps=20,
    updates_per_iteration=2,
    iterations_per_round=1,
    iterations_per_checkpoint=2,
    tokens_per_microbatch=60,
    rounds=10,
    eval_prompts=3,
    eval_rollouts=2,
)
WORST = inputs.assume(inputs.read_inputs(), "worst")
MEASURED = {
    "judge_cpu_seconds": 0.0,
    "stage_cpu_seconds": 0.0,
    "files": {"sha256": 1.0, "md5": 1.0, "dvc_repro": 0.0},
    "rollouts": {
        "bytes_per_step": 1.0,
        "reward_bytes_per_rollout": 1.0,
        "seconds_per_step": 1e-6,
    },
    "weights": {"first": 1.5, "offer": 0.5, "load": 0.25},
}


@pytest.fixture(scope="module")
def real() -> PreTrainedModel:
    torch.manual_seed(0)
    return inputs.make_class(SPEC)(inputs.make_config(SPEC)).to(torch.bfloat16).eval()


@pytest.fixture(scope="module")
def model() -> inputs.Model:
    return inputs.make_model(SPEC, measure.measure_block(SPEC))


def case(model: inputs.Model, **changes: Any) -> results.Case:
    dealt = work.Dealt(waves=3, slowest_flops=1e15)
    parts: dict[str, Any] = {
        "run": RUN,
        "scored": dealt,
        "updates": [dealt] * 2,
        "measured": MEASURED,
        "assumed": WORST,
    }
    return results.Case(model=model, **{**parts, **changes})


def test_one_measured_block_gives_the_whole_model(real: PreTrainedModel, model: inputs.Model):
    assert model.parameters == sum(each.numel() for each in real.parameters())
    assert model.flops.forward == TokenFlops(real).forward
    assert model.flops.training == TokenFlops(real).training


def test_the_runs_are_of_the_sizes_that_they_are_called():
    sizes = {name: inputs.count(spec) for name, spec in inputs.read_inputs()["runs"].items()}
    assert [round(each["parameters"] / 1e8) for each in sizes.values()] == [76, 328]


def test_a_block_more_keeps_what_was_measured_of_one(model: inputs.Model):
    counts = []
    for blocks in (2, 3):
        config = inputs.make_config(SPEC, num_hidden_layers=blocks)
        body = inputs.make_class(SPEC)(config).to(torch.bfloat16).get_decoder()
        with saved_bytes(body) as saved:
            mask = torch.zeros(2, 1, 12, 12, dtype=torch.bfloat16)
            output = body(input_ids=torch.zeros(2, 12, dtype=torch.long), attention_mask=mask)
        assert output.last_hidden_state.requires_grad
        counts.append(saved.total)
    assert counts[1] - counts[0] == 2 * 12 * model.activation_bytes


def test_heads_get_copies_of_keys_and_values_as_on_a_gpu(
    real: PreTrainedModel, model: inputs.Model
):
    assert measure.activation_bytes(real, rows=2, width=12) == model.activation_bytes


def test_keys_and_values_take_what_a_real_cache_takes(real: PreTrainedModel, model: inputs.Model):
    cache = DynamicCache(config=real.config)
    with torch.no_grad():
        real(input_ids=torch.zeros(2, 7, dtype=torch.long), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 2 * 7 * model.cache_bytes


def test_states_and_their_directory_take_what_real_ones_take(
    real: PreTrainedModel, model: inputs.Model, tmp_path: Path
):
    trained = inputs.make_class(SPEC)(real.config).to(torch.bfloat16)
    params = read_params(Path(__file__).parents[1] / "params.yaml")
    optimizer = make_optimizer(trained, params.arms["plain"].training)
    copies = optimized_tensors(optimizer)
    for each in copies:
        each.grad = torch.ones_like(each)
    optimizer.step()
    held = results.training_bytes(RUN, model)
    assert held["weights"] == sum(each.nbytes for each in trained.parameters())
    assert held["copies"] == held["gradients"] == sum(each.nbytes for each in copies)
    moments = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    assert held["moments"] == sum(each.nbytes for each in moments)
    write_trained(tmp_path, gather_trained(trained, optimizer))
    sizes = [(tmp_path / name).stat().st_size for name in (WEIGHTS, OPTIMIZER)]
    headers = 300 * 5 * len(trainable(trained))
    assert 0 < sum(sizes) - case(model).stored_bytes < headers


def test_rollouts_have_the_mean_and_the_end_that_are_asked_for():
    steps = work.draw_steps(10_000, mean=800, longest=3072)
    assert steps.mean() == pytest.approx(800, rel=1e-3)
    assert steps.min() >= 1
    assert 0.01 < (steps == 3072).mean() < 0.1


def test_ranks_compute_no_less_than_one_and_wait_for_the_slowest(model: inputs.Model):
    rollouts = work.trained_rollouts(RUN, 1.0)
    alone = work.deal(model.flops, rollouts, RUN, parts=2, is_training=True)
    dealt = work.deal(model.flops, rollouts, replace(RUN, gpus=2), parts=2, is_training=True)
    for one, two, part in zip(alone, dealt, np.split(rollouts, 2)):
        packed = pack_microbatches(torch.from_numpy(part[:, 1:].sum(axis=1)), 60)
        assert one.waves == len(packed) > 2
        assert one.slowest_flops == packed_flops(model.flops, part, 60, True)
        assert two.waves == -(-one.waves // 2)
        assert one.slowest_flops / 2 <= two.slowest_flops < one.slowest_flops


def test_a_rollout_alone_reads_weights_and_what_it_looks_back_at_at_every_step(model: inputs.Model):
    """3 steps behind 5 tokens look back at 5.5, 6.5 and 7.5 in the mean: 19.5 in all."""
    engine = work.Engine(model=model, gpus=1, assumed=WORST)
    alone = engine.decode_seconds(np.array([3]), prompt_tokens=5, at_once=1)
    moved = 3 * model.parameters * 2 + 19.5 * model.cache_bytes
    assert alone == pytest.approx(moved / (3350e9 * 0.5))
    two = np.array([3, 3])
    assert engine.decode_seconds(two, prompt_tokens=5, at_once=1) == pytest.approx(2 * alone)
    together = engine.decode_seconds(two, prompt_tokens=5, at_once=2)
    assert together == pytest.approx(2 * alone - 3 * model.parameters * 2 / (3350e9 * 0.5))


def test_steps_of_many_rollouts_take_what_their_flops_take(model: inputs.Model):
    engine = work.Engine(model=model, gpus=2, assumed=WORST)
    count, contexts = model.flops.forward, np.full(100_000, 10.0)
    flops = 100_000 * (count.body + count.head + 10 * count.attention)
    slow = replace(engine, assumed=replace(WORST, gpu_tflops=1e-3))
    assert slow.step_seconds(contexts) == pytest.approx(flops / (1e9 * 0.3) / 2)


def test_a_gather_takes_the_slower_of_nvlink_and_network(model: inputs.Model):
    """Of 64 GB, 8 GPUs of a host get 56 each; 2 hosts get 32 each, by 8 links of 25 GB/s."""
    one, two = (case(model, run=replace(RUN, gpus=gpus)) for gpus in (8, 16))
    assert one.gather_seconds(64e9) == pytest.approx(56 / 225)
    assert two.gather_seconds(64e9) == pytest.approx(60 / 225)
    far = replace(two, assumed=replace(WORST, network_gb_per_second=10.0))
    assert far.gather_seconds(64e9) == pytest.approx(32 / 40)


def test_an_arm_pays_for_its_share_of_rounds_and_of_updates(model: inputs.Model):
    whole = {"sampling": 60.0, "scoring": 10.0, "updates": 20.0, "evaluation": 5.0, "copy": 5.0}
    shares = {"sampled_steps": {"value": 0.5}, "trained_steps": {"value": 0.25}}
    found = results.price_arms(case(model), whole, {"half": shares})
    once = found["uniform"]["hours"] - 10 * 100 / 3600  # the profile
    assert found["half"]["rounds"] == 5
    assert found["half"]["hours"] - once == pytest.approx(5 * 85 / 3600)
    assert found["half"]["usd"] == pytest.approx(found["half"]["hours"] * 4)


def test_changes_of_a_run_add_up(model: inputs.Model):
    """10 rounds of 60 + 10 + 20 + 5 + 6 + 4 s; a quarter of them, of four times the first three."""
    whole = {"sampling": 60.0, "scoring": 10.0, "updates": 20.0, "evaluation": 5.0}
    on_four = case(model, run=replace(RUN, gpus=4))
    ways = results.work_out_ways(on_four, {**whole, "copy": 6.0, "fingerprints": 4.0})
    assert ways["as it is"] == pytest.approx({"hours": 10 * 105 / 3600, "share": 95 / 105})
    assert ways["linked"] == pytest.approx({"hours": 10 * 99 / 3600, "share": 95 / 99})
    larger = 4 * 90 + 9
    assert ways["larger"] == pytest.approx({"hours": 2.5 * larger / 3600, "share": 365 / larger})


def test_what_does_not_fit_is_refused(model: inputs.Model):
    small = replace(WORST, gpu_memory_gb=8e-4)
    with pytest.raises(
        ValueError, match=r"a microbatch must have at most \d+ tokens on 1 GPUs, has 60"
    ):
        results.limits(case(model, assumed=small))
    with pytest.raises(ValueError, match="must have room for a rollout, has none on 1 GPUs"):
        results.seconds_of_sampling(case(model, assumed=small), gpus=1)
    with pytest.raises(ValueError, match="mean_steps must be below max_steps, 8, got 8"):
        work.draw_steps(10, mean=8, longest=8)


def test_a_round_of_iterations_starts_and_stores_once(model: inputs.Model):
    """Of n iterations, n - 1 get new weights; engines of train@ start from the second on."""
    one = results.seconds_of_round(case(model))
    three = case(model, run=replace(RUN, iterations_per_round=3))
    found = results.seconds_of_round(three)
    for part in ("sampling", "scoring", "updates", "records"):
        assert found[part] == pytest.approx(3 * one[part]), part
    for part in ("evaluation", "fingerprints", "load and store", "hash", "copy"):
        assert found[part] == one[part], part
    assert found["fingerprints"] == pytest.approx(three.stored_bytes / 1e9 / 8)
    far = replace(
        three, run=replace(three.run, gpus=16), assumed=replace(WORST, files_gb_per_second=0.1)
    )
    read = results.seconds_of_files(far)["fingerprints"]
    assert read == pytest.approx(three.stored_bytes / 1e8)
    assert one["weights"] == one["checkpoints"] == 0
    weights = 2 * sum(results.seconds_of_weights(three).values())
    assert found["weights"] == pytest.approx(weights + results.seconds_of_first_offer(three))
    assert found["checkpoints"] == pytest.approx(found["load and store"] - three.file_seconds(
        three.stored_bytes))  # fmt: skip
    starts = WORST.engine_start_seconds + three.file_seconds(2 * model.parameters)
    assert found["starts"] - one["starts"] == pytest.approx(starts)


def test_samplers_wait_for_a_gather_a_copy_and_their_own_load(model: inputs.Model):
    """In GB: 0.1 s from GPU to host, 0.5 s to offer, 0.25 s to load."""
    found = results.seconds_of_weights(case(model, run=replace(RUN, gpus=8)))
    size = 2 * model.parameters
    gathered = size * 7 / 8 / 225e9
    assert found["gather"] == pytest.approx(gathered + size / 10e9)
    assert found["offer"] == pytest.approx(0.5 * size / 1e9)
    assert found["load"] == pytest.approx(0.25 * size / 1e9)
    assert found["wake"] == WORST.engine_wake_seconds
