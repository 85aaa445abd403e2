"""Measures the cost of sampling and updates in pairs and in groups of 16, by rollout length.

python -m benchmarks.group_costs          # measures every case, then writes the results
python -m benchmarks.group_costs --show   # prints the table of the results

A case is half a round of an arm of benchmarks.allocation_tokens with the prompts and the model of
recipes/reasoning-short.yaml and rollouts of a given length. The model is untrained, and its end
token is outside its vocabulary. The fraction of groups with signal is that of the arm. Writes
results/group_costs.json.
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import torch
from pydantic import TypeAdapter

from benchmarks.allocation_tokens import read_arms
from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.modalities.policy import make_rollouts
from grpo.modalities.tokens.bases import make_base
from grpo.modalities.tokens.modality import ScratchBase
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.params.parameters import LinkSpec, Parameters, Training, read_params, with_tuples
from grpo.runtime.artifacts.files import Scratch, read_json, write_json
from grpo.runtime.machine import prepare_machine
from grpo.runtime.markdown import markdown_table
from grpo.sampling.drawing import local_executor, sample_rollouts
from grpo.schema import DATA
from grpo.training.updates import Iteration, TrainingSettings, run_updates
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import make_optimizer
from grpo.wiring.tasks import build_prompts

OUT, ALLOCATION = RESULTS / "group_costs.json", RESULTS / "allocation_tokens.json"
STEPS = (8, 16, 32, 64, 128)  # of every rollout
REPEATS = 3  # of all cases in turn; the table shows medians
CONTEXT = 256  # maximum positions of the model; 128 in the recipe
ARMS = ("uniform", "two_grpo")  # of allocation_tokens.yaml


def main() -> None:
    """Measures all cases in turn unless --show is given, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group_costs")
    parser.add_argument("--show", action="store_true")
    if not parser.parse_args().show:
        arms = read_json(ALLOCATION)["runs"].values()
        shares = {
            name: round(_mean(arms, name, "trained_steps") / _mean(arms, name, "sampled_steps"), 3)
            for name in ARMS
        }
        cases = []
        for _, steps, name in product(range(REPEATS), STEPS, ARMS):
            cases.append(measure(name, steps, shares[name]))
            print(cases[-1], flush=True)
        about = {"command": "python -m benchmarks.group_costs", "machine": machine()}
        measured = {"signal_shares": shares, "cases": cases}
        write_json(OUT, {**about, "revision": revision_of("HEAD"), **measured})
    print(table(read_json(OUT), read_json(ALLOCATION)))


def measure(arm: str, steps: int, signal_share: float) -> dict[str, Any]:
    """Returns the CPU seconds of half a round.

    Args:
      steps: Length of every rollout.
      signal_share: Fraction of groups that have both outcomes.
    """
    params, settings = _params(), read_arms()[arm]
    prepare_machine(params.machine)
    training = Training.model_validate(with_tuples(settings["training"]))
    links = TypeAdapter(list[LinkSpec]).validate_python(with_tuples(settings["objective"]))
    split, sizes = settings["curriculum"]
    num_prompts = split["split_at_random"]["prompts_per_phase"] // 2
    num_updates = training.updates_per_iteration // 2
    policy = _policy(params, steps)
    prompts = build_prompts(params, ROOT / DATA).train.head(num_prompts)
    optimizer = make_optimizer(policy.model, training)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        batch = sample_rollouts(
            local_executor(policy),
            prompts.assign(rollouts=sizes["fix_group_size"]["rollouts"]),
            rollouts_per_batch=settings["sampling"]["rollouts_per_batch"],
            seed=0,
            scratch=Path(folder),
        )
        sampled = time.process_time()
        group = torch.tensor(batch.table["group"].to_numpy())
        trajectory, logp = policy.unpack(batch.tensors, group)
        assert bool(trajectory.mask.all()), "a rollout has ended"
        has_signal = group < round(signal_share * num_prompts)
        outcome = ((torch.arange(len(group)) % 2 == 0) | ~has_signal).float()
        run_updates(
            Iteration(
                policy=policy,
                trajectory=trajectory,
                rollouts=make_rollouts(
                    trajectory, logp, group=group, reward=outcome, outcome=outcome
                ),
                objective=build_objective(links, arm),
                objective_state={},
                optimizer=optimizer,
                settings=TrainingSettings(
                    updates_per_iteration=num_updates,
                    max_grad_norm=training.max_grad_norm,
                    tokens_per_microbatch=training.tokens_per_microbatch,
                    updates_per_checkpoint=num_updates + 1,
                    updates_per_audit=0,
                ),
                first_update=0,
                generator=torch.Generator().manual_seed(0),
            ),
            scratch=Scratch(folder, "round"),
            progress=lambda done, total: None,
        )
    return {
        "arm": arm,
        "steps": steps,
        "sampled_steps": trajectory.mask.numel(),
        "trained_steps": int(has_signal.sum()) * steps,
        "sampling_cpu_seconds": round(sampled - start, 3),
        "updates_cpu_seconds": round(time.process_time() - sampled, 3),
    }


def _params() -> Parameters:
    """Returns the recipe with a model with more positions."""
    params = read_params(SHORT_ROLLOUTS)
    base = params.policy.base
    assert isinstance(base, ScratchBase)
    config = {**base.config, "max_position_embeddings": CONTEXT}
    longer = params.policy.model_copy(update={"base": base.model_copy(update={"config": config})})
    return params.model_copy(update={"policy": longer})


def _policy(params: Any, steps: int) -> TokenPolicy:
    """Returns an untrained policy whose rollouts all have the same number of steps."""
    model, tokenizer = make_base(params, ROOT / DATA)
    model.generation_config.eos_token_id = None
    tokenizer.add_special_tokens({"eos_token": "<beyond the vocabulary>"})
    decoding = Decoding(temperature=1.0, max_steps=steps)
    policy = TokenPolicy(model, tokenizer, decoding=decoding, uses_chat_template=False)
    _ = policy.flops.forward  # counted once per model, not per case
    return policy


def table(results: dict[str, Any], allocation: dict[str, Any]) -> str:
    """Returns a Markdown table of microseconds per step and of 2-GRPO's time to reach uniform.

    The time is the number of rounds in `allocation` times the cost of a round here.
    """
    titles = ["steps per rollout"]
    titles += [f"{part}, {arm}" for part in ("sampled step", "trained step") for arm in ARMS]
    titles += ["ratio of a sampled step", "of a trained step", "time of two_grpo"]
    rounds = rounds_to_reach(allocation)
    rows = []
    for steps in STEPS:
        own = {arm: _median_case(results["cases"], arm, steps) for arm in ARMS}
        sampled, trained = (
            [1e6 * each[f"{part}_cpu_seconds"] / each[f"{kind}_steps"] for each in own.values()]
            for part, kind in (("sampling", "sampled"), ("updates", "trained"))
        )
        uniform, pairs = (
            each["sampling_cpu_seconds"] + each["updates_cpu_seconds"] for each in own.values()
        )
        share = rounds * pairs / (read_arms()["uniform"]["rounds"] * uniform)
        microseconds = [f"{each:.0f} us" for each in (*sampled, *trained)]
        ratios = [f"{each[1] / each[0]:.2f}" for each in (sampled, trained)]
        rows.append([str(steps), *microseconds, *ratios, f"{share:.0%}"])
    return markdown_table(titles, rows)


def rounds_to_reach(allocation: dict[str, Any]) -> float:
    """Returns the number of rounds after which two_grpo's mean curve reaches uniform's gain."""
    runs = allocation["runs"].values()
    share = allocation["summary"]["two_grpo"]["cpu_seconds_to_reach"]["value"]
    ends = {arm: _mean(runs, arm, "cpu_seconds") for arm in ARMS}
    rounds = float(share * read_arms()["two_grpo"]["rounds"])
    return rounds * ends["uniform"] / ends["two_grpo"]


def _mean(runs: Any, arm: str, name: str) -> float:
    """Returns the mean over seeds of a final cost of an arm."""
    return mean(float(run[arm][-1][name]) for run in runs)


def _median_case(cases: list[dict[str, Any]], arm: str, steps: int) -> dict[str, float]:
    own = pd.DataFrame([each for each in cases if (each["arm"], each["steps"]) == (arm, steps)])
    return {str(name): float(each) for name, each in own.drop(columns="arm").median().items()}


if __name__ == "__main__":
    main()
