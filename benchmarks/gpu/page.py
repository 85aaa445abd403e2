"""The page of the results: docs/gpu.md."""

from typing import Any

from grpo.runtime.markdown import markdown_table

Result = dict[str, Any]
HEAD = """\
# GPU measurements

`python -m benchmarks.gpu` measures in one call all that needs a GPU, and writes this page and
[its numbers](../benchmarks/results/gpu.json). A call takes at most ten minutes. Call it again for
the parts that it did not reach: parts that the results have of the same code and device are not
repeated. A part runs in its own process with a time limit. If it fails, its row says why and the
others go on. No part needs a network: models have published shapes and random weights. The column
`code` is a digest of the Python files that a part ran with.

| part | what it measures |
|---|---|
| tests | the tests that need a GPU (`pytest -m gpu tests/gpu`) |
| throughput | sampling by the model's own class, and one update, in bfloat16; FLOPs used |
| vllm | tokens per second and log-probs of vLLM and of the model's own class |
| trl | whole updates of TRL's `GRPOTrainer` beside ours, sampling included |
| memory | the peak of an update, divided by the prediction of [benchmarks/scale](scale.md) |
| two ranks | weights and moments after training in two ranks, against one rank |
| twin | all stages of a recipe on a tiny model of its class, in bfloat16 |

Models have the shapes of Qwen2.5. `vllm` needs vLLM and `trl` needs TRL in the environment; `two
ranks` needs two devices.
"""
H100 = "NVIDIA H100 80GB HBM3, full"
FINDINGS = """\
What the run on an H100 shows:

* **Sampling by the model's own class waits for the host.** The GPU is busy for less than a fifth
  of its seconds, and a model of three times the size takes about the same time. So sample many
  rollouts per batch, or use [vLLM](own-model.md#sampling-with-vllm), which has not run on a GPU
  here.
* An update and its sampling take as long as TRL's with the same model class and rollouts.
* The peak memory of an update is below the prediction.
* One test fails: log-probs of Qwen2.5-VL's classes in float32. Sampling, scoring and the CPU do
  not agree within 1e-4; which of them differs was not stored. A cause may be convolutions in TF32,
  which is torch's default on a GPU. The twin of this model, in bfloat16, passes.

The H100 was lent for half an hour, on a machine with torch 2.11.0 instead of the pinned 2.13.0. It
ran with the FLOP counter of 2.13.0, because that of 2.11.0 cannot count grouped-query attention.
"""
NO_GPU = """\
**There is no number of a GPU on this page.** What follows ran on a CPU at a tiny size. It shows
that the command works, and says nothing about speed or memory on a GPU."""


def write_page(results: Result) -> str:
    """Returns the page of all runs."""
    runs = results["runs"]
    on_gpu = [run for run in runs.values() if run["device"].get("memory_bytes")]
    parts = [HEAD, *([] if on_gpu else [f"{NO_GPU}\n"]), *([FINDINGS] if H100 in runs else [])]
    for name, run in sorted(runs.items(), key=lambda each: each[1] not in on_gpu):
        versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items() if value)
        parts.append(f"## {name}\n\n`{run['command']}`, {versions}.\n")
        parts.append(states_table(run) + "\n")
        if speeds := speeds_table(run):
            parts.append(speeds + "\n")
    return "\n".join(parts)


def states_table(run: Result) -> str:
    """Returns what each part found, or why it did not run, as Markdown."""
    rows = [
        [
            name,
            part["state"],
            f"{part['seconds']:.0f}" if "seconds" in part else "",
            _in_words(part),
            part["code"],
        ]
        for name, part in run["parts"].items()
    ]
    return markdown_table(["part", "state", "seconds", "result", "code"], rows)


def speeds_table(run: Result) -> str:
    """Returns tokens per second and utilization by model as Markdown; empty without them."""
    titles = ["model", "parameters", "what", "seconds", "of these, the GPU is busy", "tokens per s"]
    titles += ["share of a matrix product's FLOPs per s", "MFU by data sheet"]
    rows = []
    for name, part in run["parts"].items():
        if name.startswith("throughput") and part["state"] == "done":
            found = part["result"]
            for what in ("sampling", "update"):
                own = found[what]
                mfu = "-" if own["mfu"] is None else f"{own['mfu']:.1%}"
                seconds = ", ".join(f"{each:.2f}" for each in own["seconds"])
                busy = own["busy_seconds"]
                rows.append(
                    [
                        name.removeprefix("throughput "),
                        f"{found['parameters'] / 1e6:.1f} M",
                        what,
                        seconds,
                        "-" if busy is None else f"{busy:.2f}",
                        f"{own['tokens_per_second']:.0f}",
                        f"{own['share_of_product']:.1%}",
                        mfu,
                    ]
                )
    return markdown_table(titles, rows) if rows else ""


def _in_words(part: Result) -> str:
    """Returns the result of a part in a few words."""
    if part["state"] != "done":
        return str(part["reason"]).replace("|", "/")
    match part["result"]:
        case {"passed": passed, "skipped": skipped, "failures": failures}:
            failed = f", failed: {', '.join(failures)}" if failures else ""
            return f"{passed} passed, {skipped} skipped{failed}"
        case {"drift_max": drift, "updates": updates}:
            return f"{updates} updates, drift at most {drift:.2g} nats"
        case {"measured_per_predicted": ratio, "peak_is_of": what}:
            return f"{ratio:.2f} of the prediction (peak of {what})"
        case {"vllm_tokens_per_second": fast, "transformers_tokens_per_second": slow, **rest}:
            apart = f"{rest['logp_difference_mean']:.2g} / {rest['logp_difference_p99']:.2g}"
            rates = f"{fast:.0f} tokens per s, transformers {slow:.0f}"
            return f"{rates}; log-probs differ by {apart} nats (mean / 99th percentile)"
        case {"ours_per_trl": ratio}:
            return f"{ratio:.2f} of TRL's seconds per update"
        case {"backend": backend, "largest_difference": apart}:
            values = ", ".join(f"{name} {value:.1g}" for name, value in apart.items())
            return f"{backend}; largest difference: {values}"
    return "in the table below"
