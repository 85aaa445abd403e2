"""Profiles the CPU time of an update with torch's profiler: generation, log-probs and gradient.

python -m benchmarks.step_profile    # writes benchmarks/results/step_profile.json

The results also have the FLOPs of each part, the seconds of generation inside the model, and the
speed of a matrix product on this processor.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from benchmarks.demo import RESULTS, machine, revision_of
from benchmarks.peer_trl import workload
from benchmarks.peer_trl.ours import make_policy, objective, rewarded, training_settings
from benchmarks.peer_trl.tune import read_fastest
from benchmarks.peer_trl.workload import SIZES, Clock, Scenario, now
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.markdown import markdown_table
from grpo.training.batches import plan_batches
from grpo.training.frozen import compute_log_probs
from grpo.training.updates import Loss, run_update

OUT = RESULTS / "step_profile.json"
NUM_OPERATORS = 16
NUM_SHOWN = 3


def main() -> None:
    """Profiles every size and prints the tables of docs/speed.md."""
    torch.set_num_threads(1)
    sizes = {name: profile_size(name) for name in SIZES}
    content = {
        "command": "python -m benchmarks.step_profile",
        "revision": revision_of("HEAD"),
        "machine": machine(),
        "product_flops_per_second": round(product_speed()),
        "sizes": sizes,
    }
    write_json(OUT, content)
    print(table(content), limits(content), sep="\n\n")


def profile_size(name: str) -> dict[str, Any]:
    """Returns the seconds and the operators of each part of one update."""
    scenario = Scenario(size=name, settings=read_fastest(name)["ours"])
    policy = make_policy(scenario, workload.COMPLETION_TOKENS)
    settings = training_settings(scenario)
    prompts = workload.make_prompts(scenario)
    sizes = [workload.ROLLOUTS_PER_GROUP] * len(prompts)
    generator = torch.Generator().manual_seed(0)
    inside = seconds_inside(policy, prompts, sizes)
    with profiled(policy) as generation:
        trajectory, logp = policy.sample(prompts, group_sizes=sizes, generator=generator)
    generation |= inside
    reward = (trajectory.tokens.sum(dim=1) % 2).float()
    rollouts = rewarded(trajectory, logp, reward)
    batches, _ = plan_batches(objective(), rollouts, {}, num_batches=1, generator=generator)
    with profiled(policy) as scoring:
        weight = trajectory.mask.float()
        proximal = compute_log_probs(policy, trajectory, weight, settings.tokens_per_microbatch)
    with profiled(policy) as update:
        run_update(
            Loss(
                policy=policy,
                objective=objective(),
                trajectory=trajectory,
                proximal=proximal,
                reference=None,
                tokens_per_microbatch=settings.tokens_per_microbatch,
            ),
            batches[0],
            optimizer=AdamW(policy.model.parameters(), lr=workload.LEARNING_RATE),
            max_grad_norm=settings.max_grad_norm,
            update=0,
        )
    return {"generation": generation, "scoring": scoring, "update": update}


def seconds_inside(policy: TokenPolicy, prompts: list[str], sizes: list[int]) -> dict[str, float]:
    """Returns CPU seconds of sampling without a profiler, in total and inside the model.

    Inside the model are its head and the parts of its body, which sampling calls one by one.
    """
    clock, starts = Clock(), []
    hooks = []
    body = policy.model.get_decoder()
    around = [each for each in body.children() if each is not body.layers]
    for part in (*around, *body.layers, policy.model.get_output_embeddings()):
        hooks += [
            part.register_forward_pre_hook(lambda *_: starts.append(now())),
            part.register_forward_hook(lambda *_: clock.measure("model", starts.pop())),
        ]
    start = now()
    policy.sample(prompts, group_sizes=sizes, generator=torch.Generator().manual_seed(0))
    clock.measure("sample", start)
    for hook in hooks:
        hook.remove()
    return {
        "cpu_seconds": round(clock.seconds["sample"], 3),
        "cpu_seconds_inside_the_model": round(clock.seconds["model"], 3),
    }


def product_speed() -> float:
    """Returns FLOPs per CPU second of a square matrix product, the best of ten runs."""
    size = 1024
    left, right = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(10):
        start = now()
        torch.mm(left, right)
        seconds.append(now() - start)
    return 2 * size**3 / min(seconds)


@contextmanager
def profiled(policy: TokenPolicy) -> Iterator[dict[str, Any]]:
    """Yields a dictionary that receives FLOPs, CPU seconds and operators of the block."""
    content: dict[str, Any] = {}
    _ = policy.flops.forward, policy.flops.training  # counted before the clock starts
    start, before = now(), policy.cost.flops
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield content
    content["cpu_seconds_with_profiler"] = round(now() - start, 3)
    content["flops"] = policy.cost.flops - before
    events = sorted(profiler.key_averages(), key=lambda each: -each.self_cpu_time_total)
    total = sum(each.self_cpu_time_total for each in events)
    content["operators"] = [
        {
            "operator": each.key,
            "calls": each.count,
            "seconds": round(each.self_cpu_time_total / 1e6, 4),
            "share": round(each.self_cpu_time_total / total, 3),
        }
        for each in events[:NUM_OPERATORS]
    ]


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of seconds and slowest operators by size and part."""
    rows = [
        [size, part, f"{found['cpu_seconds_with_profiler']:.2f}", _largest(found)]
        for size in SIZES
        for part, found in results["sizes"][size].items()
    ]
    return markdown_table(["size", "part", "CPU s", "largest operators"], rows)


def limits(results: dict[str, Any]) -> str:
    """Returns a Markdown table that compares each size with its lower bounds."""
    titles = ["size", "generation, CPU s", "of it inside the model", "update, GFLOPs per CPU s"]
    titles += ["a large product, GFLOPs per CPU s"]
    rows = list[list[str]]()
    product = results["product_flops_per_second"] / 1e9
    for size in SIZES:
        generation, update = (results["sizes"][size][part] for part in ("generation", "update"))
        whole, inside = generation["cpu_seconds"], generation["cpu_seconds_inside_the_model"]
        speed = update["flops"] / update["cpu_seconds_with_profiler"] / 1e9
        rows.append([size, f"{whole:.2f}", f"{inside:.2f}", f"{speed:.0f}", f"{product:.0f}"])
    return markdown_table(titles, rows)


def _largest(part: dict[str, Any]) -> str:
    """Returns short names and shares of the slowest operators."""
    shown = []
    for each in part["operators"][:NUM_SHOWN]:
        name = each["operator"].removeprefix("aten::")
        name = name.replace("_scaled_dot_product_flash_attention_for_cpu", "attention")
        shown.append(f"{name} {each['share']:.0%}")
    return ", ".join(shown)


if __name__ == "__main__":
    prog = "python -m benchmarks.step_profile"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    main()
