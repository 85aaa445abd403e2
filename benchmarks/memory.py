"""Compares the memory that `grpo check` predicts with what processes take, on a CPU.

python -m benchmarks.memory            # writes results/memory.json; ten minutes, 4 GB of memory

Target, set before the first run: every prediction is within 15 % of what is measured.

A case is a policy with random weights of a size, a dtype, with or without recomputation or
adapters, that samples a batch or makes two updates of two microbatches of the longest rollouts.
`predicted` is the peak of a dry run of `grpo/wiring/memory.py`, weights and states included.
`measured` is what a process of its own adds to its resident memory from before it loads the policy
to the peak of the work (VmHWM, which is reset after the load), so that what allocator and kernels
add counts. `libraries` is its resident memory before: Python, its imports, and what they allocate
in the same work on a tiny policy; `predicted_libraries` is what `grpo check` takes for it. Weights
are first copied out of a file that is mapped to memory, whose pages the system can evict, and freed
memory is returned to the system before the work. Rollouts do not end early, and a robot's
simulator, which runs in processes of its own, is left out.

Processes run with machine.memory_gb, without which nothing is refused. `kept` is the same work
without it, where the allocator keeps what is freed. `again` is what the same process adds if it
does the work in bfloat16 once more: kernels for its shapes are then made.
"""

import argparse
import ctypes
import gc
import importlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.demo import RESULTS, machine, revision_of
from benchmarks.workspaces import reset_peak, resident_peak
from grpo.modalities.action_chunks.bases import BlankScenes
from grpo.modalities.action_chunks.policy import ActionChunkPolicy
from grpo.modalities.shared.text_policy import TextPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import resolved_text
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import read_json, write_bytes, write_json
from grpo.runtime.machine import prepare_machine
from grpo.runtime.markdown import markdown_table
from grpo.schema import DATA
from grpo.tasks.base import TaskInputs
from grpo.training.updates import run_update
from grpo.wiring.memory import PolicyMemory, draw_prompts, make_update
from grpo.wiring.objectives import build_objective
from grpo.wiring.policies import build_base, draws_of_arm, load_policy, make_optimizer

OUT = RESULTS / "memory.json"
TARGET = 0.15
GROUP = 8  # rollouts of a prompt when sampling
WORKS = "sample", "update"
UPDATES, MICROBATCHES = 2, 2
LIMIT = {"machine.memory_gb": 24.0}  # far above every case
KEPT = "medium", "float32"  # the size and the variant that are measured without a limit, too
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"machine.dtype": "bfloat16"},
    "recompute": {"policy.recompute": True},
    "LoRA": {
        "policy.lora": {
            "rank": 16,
            "alpha": 32,
            "dropout": 0.0,
            "target_modules": ["q_proj", "v_proj"],
        }
    },
}


def _decoder(hidden: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 512,
    }


def _tokens(hidden: int, layers: int) -> dict[str, Any]:
    return {"policy.base.config": _decoder(hidden, layers), "policy.max_steps": 48}


def _seq2seq(hidden: int, layers: int) -> dict[str, Any]:
    config: dict[str, int] = {"d_model": hidden}
    for part in ("encoder", "decoder"):
        config |= {
            f"{part}_layers": layers,
            f"{part}_attention_heads": hidden // 64,
            f"{part}_ffn_dim": 3 * hidden,
        }
    return {"policy.base.config": config}


def _vision_language(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "policy.base.config": {"projection_dim": hidden, "hidden_size": hidden},
        "policy.base.vision_config": {"hidden_size": 256, "intermediate_size": 512},
        "policy.base.text_config": {**_decoder(hidden, layers), "head_dim": 64},
        "policy.base.warmup": {"prompts": 64, "rows_per_update": 4},
    }


def _denoising(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "policy.base.transformer": {
            "num_layers": layers,
            "attention_head_dim": 64,
            "num_attention_heads": hidden // 64,
            "caption_projection_dim": hidden,
        }
    }


def _action_chunks(hidden: int, layers: int) -> dict[str, Any]:
    return {"policy.base.backbone.config": _decoder(hidden, layers)}


# By modality: its recipe, the changes of it by width and number of blocks, and the number of the
# longest rollouts in a microbatch.
MODALITIES: dict[str, tuple[str, Callable[[int, int], dict[str, Any]], int]] = {
    "tokens": ("params.yaml", _tokens, 8),
    "denoising": ("recipes/glyphs.yaml", _denoising, 8),
    "action_chunks": ("recipes/manipulation.yaml", _action_chunks, 8),
    "seq2seq": ("recipes/translation.yaml", _seq2seq, 16),
    "vision_language": ("recipes/grounding.yaml", _vision_language, 16),
}
SIZES = {"small": (384, 3), "medium": (512, 4), "large": (768, 6)}
VARIED = ("tokens", "denoising")  # modalities with other variants than float32
SAMPLED = 16  # rollouts of a batch


def cases() -> Iterator[dict[str, Any]]:
    """Yields the cases; variants are those of one size, and adapters of tokens only."""
    for modality, (recipe, changes, rows) in MODALITIES.items():
        for size, shape in SIZES.items():
            is_varied = modality in VARIED and size == "medium"
            for variant, more in VARIANTS.items():
                has_adapters = variant == "LoRA"
                if variant == "float32" or (
                    is_varied and (modality == "tokens" or not has_adapters)
                ):
                    yield {
                        "modality": modality,
                        "size": size,
                        "variant": variant,
                        "recipe": recipe,
                        "changes": more,
                        "scaled": changes(*shape),
                        "rows": rows,
                    }


def main() -> None:
    """Predicts and measures every case, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--only", help="a modality, whose results replace the stored ones")
    chosen = parser.parse_args()
    for each in MODALITIES:  # their imports, which the processes of all cases share
        importlib.import_module(f"grpo.modalities.{each}.bases")
    stored = read_json(OUT)["rows"] if chosen.only and OUT.exists() else []
    rows = [each for each in stored if each["modality"] != chosen.only]
    for case in cases():
        if chosen.only in (None, case["modality"]):
            rows += measure(case)
            write_json(
                OUT,
                {
                    "command": "python -m benchmarks.memory",
                    "target": TARGET,
                    "rows": rows,
                    "machine": machine(),
                    "revision": revision_of("HEAD"),
                },
            )
    results = read_json(OUT)
    print(table(results), kept_table(results), *claims(results), sep="\n")


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the predicted and the measured bytes of sampling and of updates of a case."""
    limited = {**case, "changes": {**case["changes"], **LIMIT}}
    with tempfile.TemporaryDirectory() as folder:
        found = {
            work: _in_fork(partial(_run, limited, Path(folder), work))
            for work in ("make", "predict", *WORKS)
        }
        if (case["size"], case["variant"]) == KEPT:
            for work in WORKS:
                found[work]["kept"] = _in_fork(partial(_run, case, Path(folder), work))
    about = {name: case[name] for name in ("modality", "size", "variant")}
    return [
        {
            **about,
            "work": work,
            "parameters": found["predict"]["parameters"],
            "predicted": found["predict"][work],
            "predicted_libraries": found["predict"]["libraries"],
            "prediction_cpu_seconds": found["predict"]["cpu_seconds"],
            **found[work],
        }
        for work in WORKS
    ]


def _in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what work returns in a process of its own, which has the imports of this one."""
    context = multiprocessing.get_context("fork")
    listener, speaker = context.Pipe(duplex=False)
    process = context.Process(target=lambda: speaker.send_bytes(json.dumps(work()).encode()))
    process.start()
    speaker.close()
    found: dict[str, Any] = json.loads(listener.recv_bytes())
    process.join()
    return found


def _run(case: dict[str, Any], folder: Path, work: str) -> dict[str, Any]:
    """Does one part of a case in this process."""
    tiny = read(folder / "tiny.yaml", case, case["changes"])
    params = read(folder / "params.yaml", case, {**case["changes"], **case["scaled"]})
    prepare_machine(params.machine)
    if work == "make":
        make_base(tiny, folder / "tiny")
        make_base(params, folder / "base")
        return {}
    if work == "predict":
        return predict(params, case["rows"])
    # The libraries load code and allocate at their first use.
    load_and_work(tiny, folder / "tiny", work, sampled=GROUP, rows=1)
    measured, libraries, seconds = _added(params, folder / "base", work, case["rows"])
    found = {"measured": measured, "libraries": libraries, "cpu_seconds": seconds}
    if params.machine.dtype == "bfloat16":
        found["again"], *_ = _added(params, folder / "base", work, case["rows"])
    return found


def _added(params: Parameters, base: Path, work: str, rows: int) -> tuple[int, int, float]:
    """Returns the bytes that work adds at its peak, those before it, and its CPU seconds."""
    _forget()
    before, start = psutil.Process().memory_info().rss, time.process_time()
    load_and_work(params, base, work, sampled=SAMPLED, rows=rows)
    return resident_peak() - before, before, time.process_time() - start


def load_and_work(params: Parameters, base: Path, work: str, *, sampled: int, rows: int) -> None:
    """Loads a policy, and samples or makes updates; the peak is that since the load."""
    arm = next(iter(params.arms))
    settings, draws = params.arms[arm], draws_of_arm(params, arm)
    prompts = params.modality.rehearsed_prompts(params) or draw_prompts(params, DATA)
    policy = load_policy(params, base=base, directory=base, draws=draws)
    if isinstance(policy, TextPolicy):
        for each in (*policy.model.parameters(), *policy.model.buffers()):
            each.data = each.data.clone()
        policy.end_tokens = torch.empty(0, dtype=torch.long)
    if isinstance(policy, ActionChunkPolicy):
        policy.scenes = BlankScenes(policy.model.shape)
    if work == "sample":
        sizes = [GROUP] * (sampled // GROUP)
        asked = [prompts[index % len(prompts)] for index in range(len(sizes))]
        _forget()
        policy.sample(asked, group_sizes=sizes, generator=torch.Generator().manual_seed(0))
        return
    objective = build_objective(settings.objective, arm)
    optimizer = make_optimizer(policy.model, settings.training)
    longest = policy.longest_rollouts(prompts, rollouts=MICROBATCHES * rows)
    widths = policy.widths(longest, torch.arange(1), longest.mask[:1])
    _forget()
    for update in range(UPDATES):
        loss, batch = make_update(policy, objective, longest, rows * int(widths[0]))
        run_update(loss, batch, optimizer=optimizer, max_grad_norm=1.0, update=update)


def _forget() -> None:
    """Returns freed memory to the system, and resets the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()


def predict(params: Parameters, rows: int) -> dict[str, Any]:
    """Returns the predicted peaks, and the CPU seconds of the prediction."""
    arm, start = next(iter(params.arms)), time.process_time()
    memory = PolicyMemory(params)
    assert memory.policy is not None
    draws = draws_of_arm(params, arm)
    parts = memory.sampling(draws, rollouts=SAMPLED, group_size=GROUP)
    working = memory.updates(arm).peak(rows, recompute=params.policy.recompute)
    return {
        "sample": memory.weights + max(parts.values()),
        "update": sum(memory.states(ranks=1).values()) + working,
        "parameters": sum(each.numel() for each in memory.policy.model.parameters()),
        "libraries": psutil.Process().memory_info().rss,
        "cpu_seconds": time.process_time() - start,
    }


def make_base(params: Parameters, base: Path) -> None:
    """Writes a base with random weights."""
    made = build_base(params, DATA)
    if params.modality.prompt_kind == "image":  # whose words come from a warm-up
        inputs = TaskInputs(
            seed=params.seed, data=DATA, warmup=params.policy.warmup, takes_messages=False
        )
        task = params.task.model_copy(update={"train_prompts": GROUP, "eval_prompts": GROUP})
        next(iter(made.warm_up(task.make_prompts(inputs).warmup)))
    made.save(base)


def read(file: Path, case: dict[str, Any], changes: dict[str, Any]) -> Parameters:
    """Returns the parameters of a recipe with changes of values or of parts of mappings."""
    content = parse_yaml(resolved_text(Path(case["recipe"])))
    for path, value in changes.items():
        *above, name = path.split(".")
        section = content
        for each in above:
            section = section[each]
        is_part = isinstance(value, dict) and isinstance(section[name], dict)
        section[name] = {**section[name], **value} if is_part else value
    write_bytes(file, json.dumps(content).encode())
    return read_params(file)


def claims(results: dict[str, Any]) -> list[str]:
    """Returns what the page says of the results."""
    rows = results["rows"]
    errors = [_error(each["predicted"], each["measured"]) for each in rows]
    hits = sum(abs(each) <= results["target"] for each in errors)
    again = [_error(each["predicted"], each["again"]) for each in rows if "again" in each]
    first = [(each["measured"] - each["again"]) / 1e6 for each in rows if "again" in each]
    whole = [_error(each["predicted"] + each["predicted_libraries"], _whole(each)) for each in rows]
    kept = [each for each in rows if "kept" in each and each["work"] == "update"]
    more = [100 * (each["kept"]["measured"] / each["measured"] - 1) for each in kept]
    slower = [100 * (each["cpu_seconds"] / each["kept"]["cpu_seconds"] - 1) for each in kept]
    return [
        f"{hits} of {len(errors)} predictions are within 15 %",
        f"all errors are {_span(errors)}",
        f"{min(first):.0f} to {max(first):.0f} MB",
        f"errors of the second time are {_span(again)}",
        f"errors of whole processes are {_span(whole)}",
        f"the largest process here took {max(map(_whole, rows)) / 1e9:.1f} GB",
        f"{min(more):.0f} to {max(more):.0f} % more memory",
        f"{min(slower):.0f} to {max(slower):.0f} % more CPU time",
    ]


def change_claims(results: dict[str, Any]) -> list[str]:
    """Returns how far the peak of a whole process is above its prediction."""
    rows = results["rows"]
    predicted = [each["predicted"] + each["predicted_libraries"] for each in rows]
    above = [100 * (_whole(each) / most - 1) for each, most in zip(rows, predicted)]
    return [f"is then at most {max(above):.0f} % above the prediction"]


def _error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def _span(errors: list[float]) -> str:
    lowest, highest = (f"{100 * each(errors):+.0f}%" for each in (min, max))
    return f"from {lowest} to {highest}"


def _whole(row: dict[str, Any]) -> float:
    return float(row["measured"] + row["libraries"])


def table(results: dict[str, Any]) -> str:
    """Returns predicted and measured peaks by case."""
    titles = ["policy", "size", "variant", "work", "predicted MB", "measured MB", "error"]
    titles += ["whole process MB", "error of the whole"]
    rows = [
        [
            f"{each['modality']}, {each['parameters'] / 1e6:.3g} M",
            each["size"],
            each["variant"],
            each["work"],
            f"{each['predicted'] / 1e6:.0f}",
            f"{each['measured'] / 1e6:.0f}",
            f"{100 * _error(each['predicted'], each['measured']):+.0f}%",
            f"{_whole(each) / 1e6:.0f}",
            f"{100 * _error(each['predicted'] + each['predicted_libraries'], _whole(each)):+.0f}%",
        ]
        for each in results["rows"]
    ]
    return markdown_table(titles, rows)


def kept_table(results: dict[str, Any]) -> str:
    """Returns peaks and CPU seconds with machine.memory_gb and without it."""
    titles = ["policy", "work", "predicted MB", "with limit MB", "without MB"]
    titles += ["with limit CPU s", "without CPU s"]
    rows = [
        [
            f"{each['modality']}, {each['parameters'] / 1e6:.3g} M",
            each["work"],
            f"{each['predicted'] / 1e6:.0f}",
            f"{each['measured'] / 1e6:.0f}",
            f"{each['kept']['measured'] / 1e6:.0f}",
            f"{each['cpu_seconds']:.1f}",
            f"{each['kept']['cpu_seconds']:.1f}",
        ]
        for each in results["rows"]
        if "kept" in each
    ]
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
