"""The page of the results: docs/gpu.md."""

from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.gpu.sizes import WORK
from benchmarks.intervals import span
from grpo.runtime.markdown import markdown_table

Result = dict[str, Any]
HEAD = """\
# GPU measurements

`python -m benchmarks.gpu` runs every measurement that needs a GPU, and writes this page and
its numbers, a file per device, size and version of the code. A call ends after about ten minutes;
repeat it until every part has run. A part is skipped if it has run on this device with the same
code. It runs in its own process with a time limit. If it fails, its row says why and the others go
on. No part needs a network. *Code* is a digest of the repository's Python code.

| part | what it measures |
|---|---|
| tests | the tests that need a GPU (`pytest -m gpu tests/gpu`) |
| throughput | sampling by `transformers`, and one update, in bfloat16; FLOPs used |
| vllm | tokens per second and log-probs of vLLM and of `transformers` |
| trl | whole updates of TRL's `GRPOTrainer` beside ours, sampling included |
| memory | the peak of an update, divided by the prediction of [benchmarks/scale](scale.md) |
| two ranks | weights and moments after training in two ranks, against one rank |
| twin | a recipe with a tiny random model of its class, in bfloat16, without report and lineage |

`vllm` needs vLLM and `trl` needs TRL in the environment; `two ranks` needs two devices.

The models of `throughput`, `vllm`, `trl` and `memory` have the layer sizes of Qwen2.5 0.5B and 1.5B
and random weights. They sample {rollouts_per_group} rollouts of {max_steps} tokens for each of
{prompts} prompts of {prompt_tokens} tokens, and compute updates in microbatches of
{tokens_per_microbatch} tokens. What is timed is repeated {repeats} times after a warm-up. With
`--size tiny` all of this is much smaller. *Drift* is the largest difference between a log-prob at
sampling and the same recomputed before the update. In `two ranks`, *alone* has float32 weights,
*rounded* bfloat16 weights with float32 copies. The last two columns divide FLOPs per second by
those of a product of two large bfloat16 matrices measured here, and by those of the data sheet.
"""
H100 = "nvidia-h100-80gb-hbm3-full-caa400a8d185"  # the run that the findings are of
H100_LATER = "nvidia-h100-80gb-hbm3-full-797280b8330e"
FINDINGS = """\
What the run on an H100 shows:

* **Sampling by `transformers` leaves the GPU idle.** It is busy for {sampling} % of the seconds,
  and for {update} % of those of an update. The larger model takes about as long to sample. Both
  suggest that the CPU is the bottleneck, which starts many small kernels per token. Larger batches
  or [vLLM](own-model.md#sampling-with-vllm) may help; neither was measured on a GPU.
* For the 0.5B model, an update with its sampling takes about as long as in TRL. Both sample with
  `transformers`. TRL updates bfloat16 weights directly; this project keeps float32 copies, too. The
  same work takes longer in `throughput`; the reason is not known.
* The tensors of an update need less memory than predicted. The CUDA context and cached memory are
  not counted. The ratios of the run on a CPU are of whole processes with tiny models.
* One test fails, for a tiny Qwen2.5-VL model in float32. It requires that log-probs of sampling on
  the GPU, of recomputation there, and of recomputation on the CPU agree within 1e-4. Its message
  was not stored then, so the cause is unknown. Convolutions in TF32, PyTorch's default, are an
  untested possibility. The twin of the Qwen2.5-VL recipe runs to its end in bfloat16.

The H100 was lent for half an hour, on a machine with torch 2.11.0; the project pins 2.13.0.
`torch.utils.flop_counter` was taken from 2.13.0, because that of 2.11.0 cannot count grouped-query
attention. The findings are of two runs, because sampling by vision-language models was fixed in
between: the code caa400a8d185 is that of the revision 6560db5, and 797280b8330e that of 2b2cd4a.
The first three findings are of the first run, the fourth is of the second.
"""
NO_GPU = """\
**There is no number of a GPU on this page.** What follows ran on a CPU at a tiny size. It shows
that the command works, and says nothing about speed or memory on a GPU."""


def write_page(runs: dict[str, Result]) -> str:
    """Returns the page of all runs, given by the names of their files."""
    on_gpu = [run for run in runs.values() if run["device"].get("memory_bytes")]
    parts = [HEAD.format(**asdict(WORK["full"])), *([] if on_gpu else [f"{NO_GPU}\n"])]
    if H100 in runs:
        busy = {what: percent_busy(runs[H100], what) for what in ("sampling", "update")}
        parts.append(FINDINGS.format(**busy))
    for name in sorted(runs, key=lambda name: (runs[name] not in on_gpu, name != H100, name)):
        run = runs[name]
        versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items() if value)
        link = f"[results](../benchmarks/results/gpu/{name}.json)"
        parts.append(f"## {run['device']['name']}, {run['size']}, code {run['code']}\n")
        parts.append(f"`{run['command']}`, {versions}; {link}.\n")
        parts.append(states_table(run) + "\n")
        if speeds := speeds_table(run):
            parts.append(speeds + "\n")
    return "\n".join(parts)


def percent_busy(run: Result, what: str) -> str:
    """Returns the percentage of the seconds in which the GPU is busy, over the models."""
    measured = [
        part["result"][what] for name, part in run["parts"].items() if name.startswith("throughput")
    ]
    return span([100 * each["busy_seconds"] / median(each["seconds"]) for each in measured])


def claims(run: Result) -> list[str]:
    """Returns the numbers of other pages: of an update of the largest model, and beside TRL."""
    parts = run["parts"]
    update = parts["throughput 1.5B"]["result"]["update"]
    return [
        f"reached {100 * update['mfu']:.1f} % of the data sheet's FLOPs",
        f"[{parts['trl']['result']['ours_per_trl']:.2f} times](docs/gpu.md)",
        f"busy for {percent_busy(run, 'sampling')} % of the time of sampling",
    ]


def twins_claims(runs: dict[str, Result]) -> list[str]:
    """Returns how many twins of recipes ran through the stages, in the first run and the second."""
    first, later = (
        {name: part["state"] for name, part in parts.items() if name.startswith("twin ")}
        for parts in (runs[each]["parts"] for each in (H100, H100_LATER))
    )
    done = [[*found.values()].count("done") for found in (first, later)]
    count = len({*first, *later})
    return [f"Tiny models of {done[0]} of the {count} GPU recipes ran", f"those of {done[1]} more"]


def before_claims(run: Result) -> list[str]:
    """Returns what an update took beside TRL before tokens were drawn on the GPU."""
    trl = run["parts"]["trl"]["result"]
    return [f"[{trl['ours_per_trl']:.1f} times TRL's seconds]"]


def states_table(run: Result) -> str:
    """Returns what each part found, or why it did not run, as Markdown."""
    rows = [
        [
            name,
            part["state"],
            f"{part['seconds']:.0f}" if "seconds" in part else "",
            _in_words(part),
        ]
        for name, part in run["parts"].items()
    ]
    return markdown_table(["part", "state", "seconds", "result"], rows)


def speeds_table(run: Result) -> str:
    """Returns tokens per second and utilization by model as Markdown; empty without them."""
    titles = ["model", "parameters", "what", "seconds", "GPU busy, s (one more run)"]
    titles += ["tokens per s", "share of a matrix product's FLOPs per s", "MFU by data sheet"]
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
