"""The tables of docs/scale.md, with two significant digits."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.intervals import in_words, span
from benchmarks.scale.results import BUSY, ENDS, work_out
from grpo.report.words import listed
from grpo.runtime.markdown import markdown_table

UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
HELD = {
    "weights": "weights, bfloat16, divided",
    "copies": "their copies, float32, divided",
    "gradients": "gradients, float32, divided",
    "moments": "AdamW's moments, float32, divided",
    "gathered blocks": "two gathered blocks, bfloat16",
    "a block's gradient": "a block's gradient, before and while it is added up",
    "embeddings and head, with gradients": "embeddings and head, gathered, with their gradient",
    "activations": "activations of a microbatch",
}
PARTS = {
    "starts": "starting four stages, three with samplers",
    "sampling": "sampling and judging",
    "scoring": "scoring by the policy before its updates",
    "updates": "updates",
    "weights": "new weights for the samplers",
    "records": "writing and reading rollouts",
    "evaluation": "evaluation",
    "fingerprints": "fingerprint: SHA-256 of the policy",
    "load and store": "loading and storing the policy",
    "checkpoints": "checkpoints within the round",
    "hash": "DVC hashes the policy",
    "copy": "DVC copies it to its cache",
}
MOVED = {
    "all-gathers": "all-gathers: received by a GPU per update",
    "reduce-scatters": "reduce-scatters: sent by a GPU per update",
    "policy to ranks": "weights, copies and moments to the hosts that train",
    "weights to samplers": "weights to the hosts that sample: starts and iterations",
    "rollouts": "rollouts and rewards",
    "policy": "policy's directory, and the same in DVC's cache and in S3",
    "policies of all rounds": "policies of all rounds",
}
WAYS = {
    "as it is": "as it is",
    "linked": "reflinks (XFS, Btrfs), or `dvc config cache.type hardlink`",
    "larger": "and four times the iterations per round, in a quarter of the rounds",
    "wider engines": "*not run:* and samplers on four GPUs each",
}
Formatter = Callable[[dict[str, Any]], str]  # formats a number of one run


def all_tables(inputs: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Returns all tables of the page, in page order."""
    runs = {
        f"{name} on {spec['gpus']} GPUs": results["worked_out"][name]
        for name, spec in inputs["runs"].items()
    }
    return [
        recipes(inputs, runs),
        assumptions(inputs),
        measurements(inputs, results["measured"]),
        memory(runs),
        seconds(runs),
        traffic(runs),
        prices(runs, results["savings"]["arms"]),
        ways(runs),
    ]


def recipes(inputs: dict[str, Any], runs: dict[str, Any]) -> str:
    """Returns the table of the runs."""
    rows: dict[str, Formatter] = {
        "model": lambda spec: f"{spec['model']}, {_short(spec['parameters'] / 1e9)} B parameters",
        "prompts of an iteration, rollouts of each": lambda spec: (
            f"{spec['prompts_per_iteration']} x {spec['rollouts_per_group']}"
        ),
        "tokens of a prompt; of a rollout: mean, longest": lambda spec: (
            f"{spec['prompt_tokens']}; {spec['mean_steps']}, {spec['max_steps']}"
        ),
        "updates of an iteration, iterations of a round, rounds": lambda spec: (
            f"{spec['updates_per_iteration']}, {spec['iterations_per_round']}, {spec['rounds']}"
        ),
        "iterations between checkpoints": lambda spec: str(spec["iterations_per_checkpoint"]),
        "`training.tokens_per_microbatch`": lambda spec: str(spec["tokens_per_microbatch"]),
        "prompts of an evaluation, rollouts of each": lambda spec: (
            f"{spec['eval_prompts']} x {spec['eval_rollouts']}"
        ),
    }
    specs = {
        title: {**spec, "parameters": run["parameters"]}
        for (title, run), spec in zip(runs.items(), inputs["runs"].values())
    }
    return _by_run("recipe", rows, specs)


def assumptions(inputs: dict[str, Any]) -> str:
    """Returns the table of assumptions with their sources."""
    rows = []
    for each in inputs["assumed"].values():
        ends = [each["value"]] if "value" in each else sorted(each[end] for end in ENDS)
        value = " to ".join(f"{end:g}" for end in ends)
        rows.append([each["what"], f"{value} {each['unit']}".strip(), each["source"]])
    return markdown_table(["assumed", "value", "source"], rows)


def measurements(inputs: dict[str, Any], measured: dict[str, Any]) -> str:
    """Returns the table of measurements."""
    files, stored, offered = measured["files"], measured["rollouts"], measured["weights"]
    rows = {}
    for name in inputs["runs"]:
        kept = {kind: _bytes(n) for kind, n in measured["blocks"][name]["activation_bytes"].items()}
        what = f"kept by a block of the {name} for its backward pass, per token"
        rows[what] = f"{kept['bfloat16']} in bfloat16, {kept['float32']} in float32"
    rows |= {
        "CPU s per GB of a policy: SHA-256 of fingerprints, DVC's md5, writing to a virtual disk": (
            ", ".join(_short(files[name]) for name in ("sha256", "md5", "write"))
        ),
        "speed of SHA-256 with two threads on two processors, against one": (
            f"{_short(files['side_by_side'])}x"
        ),
        "CPU s per GB of new weights: a rank offers them in memory for the first time, again; "
        "a sampler loads them": (
            ", ".join(_short(offered[name]) for name in ("first", "offer", "load"))
        ),
        "CPU s per million sampled tokens: writing and reading rollouts, twice": (
            _short(stored["seconds_per_step"] * 1e6)
        ),
        "stored rollouts, four characters per token; their rewards": (
            f"{_short(stored['bytes_per_step'])} bytes per token; "
            f"{_short(stored['reward_bytes_per_rollout'])} per rollout"
        ),
        "judging an answer by math-verify": f"{_short(measured['judge_cpu_seconds'] * 1e3)} CPU ms",
        "starting a stage, and `dvc repro` around it": (
            f"{_short(measured['stage_cpu_seconds'])} and {_short(files['dvc_repro'])} CPU s"
        ),
    }
    return markdown_table(["measured here", "value"], rows.items())


def _each(
    titles: dict[str, str], formatter: Callable[[str, dict[str, Any]], str]
) -> dict[str, Formatter]:
    """Returns one row per name, with its title."""
    return {title: partial(formatter, name) for name, title in titles.items()}


def memory(runs: dict[str, Any]) -> str:
    """Returns the table of GPU memory in training and in sampling."""
    rows = _each(HELD, lambda part, run: _gb(run["training_bytes"][part]))
    rows |= {
        "logits, in chunks, not all at once": lambda run: (
            f"{_gb(run['training_bytes']['logits'])}, not {_gb(run['limits']['all_logits_bytes'])}"
        ),
        "**training, in all**": lambda run: f"**{_gb(sum(run['training_bytes'].values()))}**",
        "tokens of the widest row that fits": _limit("widest_row"),
        "with `policy.recompute: true`": _limit("widest_row_recomputed"),
        "**sampling**: weights, bfloat16": lambda run: _gb(run["limits"]["sampled_weight_bytes"]),
        "room for keys and values": lambda run: _gb(run["limits"]["cache_room_bytes"]),
        "rollouts of mean length that have room, of those a GPU draws": lambda run: (
            f"{_short(run['limits']['rollouts_at_once'])}, of {run['limits']['rollouts_of_engine']}"
        ),
        "*not run:* in a sampler on four GPUs": _limit("rollouts_at_once_of_four"),
    }
    return _by_run("GB of a GPU", rows, runs)


def seconds(runs: dict[str, Any]) -> str:
    """Returns the table of seconds per round, by part."""

    def total(run: dict[str, Any]) -> list[float]:
        return [sum(run[end]["seconds"].values()) for end in ENDS]

    def share(kind: str, run: dict[str, Any]) -> str:
        return _percents(_computing(kind, run))

    rows = _each(PARTS, lambda part, run: _span(run, "seconds", part))
    rows |= {
        "**a round**": lambda run: f"**{_range(total(run))}**",
        "**share of it in which GPUs compute**": partial(share, "seconds"),
        "with one iteration per round": partial(share, "seconds_of_one_iteration"),
        "scoring and updates in float32: times as long": _limit("float32_factor"),
    }
    return _by_run("seconds of a round", rows, runs)


def claims(runs: dict[str, Any]) -> list[str]:
    """Returns the shares of a round in which GPUs compute, over runs and ends of the ranges."""
    of_many, of_one = (
        span([100 * each for run in runs.values() for each in _computing(kind, run)])
        for kind in ("seconds", "seconds_of_one_iteration")
    )
    return [f"GPUs compute in {of_many} % of the time; with one iteration in {of_one} %"]


def trained_claims(savings: dict[str, Any]) -> list[str]:
    """Returns the share of the sampled steps that are trained."""
    return [f"{100 * savings['trained_share']:.0f} % of the sampled steps are trained"]


def compiling_claims(inputs: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Returns the shares if every start of an engine compiled, and not the first one alone."""
    changed = copy.deepcopy(inputs)
    assumed = changed["assumed"]
    for end in ("worst", "best"):
        assumed["engine_start_seconds"][end] += assumed["engine_compile_seconds"]["value"]
    found = work_out(changed, results["measured"], results["savings"])
    shares = [
        span([100 * each for each in _computing("seconds", found[name])]) for name in inputs["runs"]
    ]
    return [f"If every start of an engine compiled, it would be {listed(shares)} %"]


def _computing(kind: str, run: dict[str, Any]) -> list[float]:
    """Returns the share of a round's seconds in which GPUs compute, at both ends of the range."""
    ends = [run[end][kind] for end in ENDS]
    return [sum(each[part] for part in BUSY) / sum(each.values()) for each in ends]


def traffic(runs: dict[str, Any]) -> str:
    """Returns the table of traffic and storage, per round unless stated otherwise."""
    rows: dict[str, Formatter] = {
        "microbatches of a GPU per update": lambda run: _short(run["waves"]),
        **_each(MOVED, lambda name, run: _bytes(run["traffic_bytes"][name])),
        "seconds of an update's traffic": lambda run: _span(run, "update", "traffic"),
        "seconds of its passes, meanwhile": lambda run: _span(run, "update", "passes"),
        "seconds of a policy to S3, by one host": lambda run: _range(
            [run[end]["s3_seconds"] for end in ENDS]
        ),
    }
    return _by_run("traffic and storage of a round", rows, runs)


def prices(runs: dict[str, Any], savings: dict[str, Any]) -> str:
    """Returns the table of GPU hours and price of a run, by arm."""
    rows = []
    for title, run in runs.items():
        for arm in ("uniform", *savings):
            shares = ["100%", "100%"]
            if arm in savings:
                kinds = ("sampled_steps", "trained_steps")
                shares = [in_words(savings[arm][kind], ".0%") for kind in kinds]
            best, worst = (run[end]["arms"][arm] for end in ENDS)
            spans = [_range([best[what], worst[what]]) for what in ("hours", "gpu_hours", "usd")]
            rows.append([title, arm, *shares, str(best["rounds"]), *spans])
    titles = ["run", "arm", "sampled", "trained", "rounds", "hours", "GPU hours", "USD"]
    return markdown_table(titles, rows)


def ways(runs: dict[str, Any]) -> str:
    """Returns the table of changes that would shorten a run, applied one after another."""

    def formatted(way: str, run: dict[str, Any]) -> str:
        found = [run[end]["ways"][way] for end in ENDS]
        hours, shares = ([each[name] for each in found] for name in ("hours", "share"))
        return f"{_range(hours)} h, {_percents(shares)}"

    return _by_run("changes, one added to the other", _each(WAYS, formatted), runs)


def _percents(shares: Sequence[float]) -> str:
    """Returns both ends of a range of shares; one if they are equal after rounding."""
    low, high = (f"{each:.0%}" for each in sorted(shares))
    return low if low == high else f"{low} to {high}"


def _limit(name: str) -> Formatter:
    return lambda run: _short(run["limits"][name])


def _by_run(title: str, rows: dict[str, Formatter], runs: dict[str, Any]) -> str:
    """Returns a table with a column per run."""
    cells = [[what, *(formatter(run) for run in runs.values())] for what, formatter in rows.items()]
    return markdown_table([title, *runs], cells)


def _span(run: dict[str, Any], kind: str, name: str) -> str:
    return _range([run[end][kind][name] for end in ENDS])


def _range(ends: Sequence[float]) -> str:
    """Returns both ends of a range; one number if they are equal after rounding."""
    low, high = map(_short, sorted(ends))
    return low if low == high else f"{low} to {high}"


def _gb(count: float) -> str:
    return _short(count / UNITS["GB"])


def _bytes(count: float) -> str:
    unit = next(name for name, size in UNITS.items() if count >= size)
    return f"{_short(count / UNITS[unit])} {unit}"


def _short(value: float) -> str:
    """Returns a positive number with two significant digits."""
    rounded = float(f"{value:.1e}")
    decimals = max(0, 1 - math.floor(math.log10(rounded)))
    return f"{rounded:,.{decimals}f}".replace(",", " ")
