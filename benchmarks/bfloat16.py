"""Trains the same base policies in float32 and in bfloat16, and measures reward and drift.

python -m benchmarks.bfloat16 0 1 2 3   # runs missing stages, then writes the results
python -m benchmarks.bfloat16           # prints the tables of the results

The cases, one per modality, and the targets are in bfloat16.yaml. All runs of a case start from one
base policy, which float32 made with seed 0. The runs are under .work/ and resume after an
interruption; remove that folder after a change of code. Writes results/bfloat16.json.
"""

import json
import random
import shutil
from collections.abc import Collection
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import M2M100Config, M2M100ForConditionalGeneration

from benchmarks import record_drift
from benchmarks.demo import ROOT
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from benchmarks.translation import share_base
from benchmarks.workspaces import make_workspace, run_stages
from grpo.modalities.seq2seq.bases import warm_up
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.objective.trust import trusted_ranges
from grpo.params.parameters import read_params
from grpo.params.recipes import merge, read_content
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import locked, read_json
from grpo.runtime.artifacts.tensors import read_tensors
from grpo.runtime.markdown import markdown_table
from grpo.training.frozen import MIN_CLIP_PER_DRIFT
from grpo.wiring.objectives import build_objective

WRITTEN = Path(__file__).with_suffix(".yaml")
WORK = ROOT / ".work" / "bfloat16"
FLOAT32, BFLOAT16 = DTYPES = ("float32", "bfloat16")
BASE, ARM, ROUND = "base", "trained", "trained-1"
OF_RUNS = {f"{stage}@{ROUND}" for stage in ("rollout", "score", "train", "evaluate")}
PAIRS = {
    "behavior and proximal": ("proximal_behavior",),
    "proximal and trainer": ("trainer_proximal",),
    "behavior and trainer": ("proximal_behavior", "trainer_proximal"),
}
METRICS = ("ratio_min", "ratio_max", "kl_to_start", "clip_fraction", "mismatch_weight_mean")
TAIL = 99  # percentile
DIGITS = 8
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMS = ("{}", "{}!", "{}?", "{}.", "a {}", "the {}", "{} of", "so {}")
RIGHT_SHARE = 0.4  # of the answers that the base of numbers has seen
Run = dict[str, Any]
FloatArray = NDArray[np.float64]


def main() -> None:
    """Runs the given seeds and writes the results of all finished seeds."""
    results = record_seeds(
        "bfloat16", read_written(), run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(gains_table(results), drift_table(results), sep="\n\n")


def read_written() -> dict[str, Any]:
    """Returns the file of cases and targets."""
    found: dict[str, Any] = parse_yaml(WRITTEN.read_text())
    return found


def run_seed(seed: int) -> dict[str, dict[str, Run]]:
    """Returns the run of every case in both dtypes."""
    runs: dict[str, dict[str, Run]] = {}
    for name, case in read_written()["cases"].items():
        base = WORK / name / BASE
        with locked(WORK / f"{name}.lock"):  # another process may run another seed
            run_in(base, parameters(case, 0, FLOAT32), skipped={*OF_RUNS, f"curriculum@{ARM}"})
        runs[name] = {}
        for dtype in DTYPES:
            workspace = WORK / name / f"{seed}-{dtype}"
            params = parameters(case, seed, dtype)
            workspace.mkdir(parents=True, exist_ok=True)
            share_base(base, workspace)
            seconds = run_in(workspace, params)
            train = seconds[f"train@{ROUND}"]
            runs[name][dtype] = {**measure(workspace), "train_cpu_seconds": round(train, 1)}
    return runs


def run_in(
    workspace: Path, params: dict[str, Any], skipped: Collection[str] = ()
) -> dict[str, float]:
    """Runs the missing stages of a workspace that has the link; returns their CPU seconds."""
    make_workspace(workspace, params)
    link = Path(record_drift.__file__)
    shutil.copyfile(link, workspace / "plugins" / link.name)
    if params["policy"]["kind"] == "seq2seq":
        make_numbers(workspace / "data")
    return run_stages(workspace, skipped)


def make_numbers(data: Path) -> None:
    """Writes prompts that ask for the number of a word, and a base that often answers wrongly."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    config = M2M100Config(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        dropout=0.0,
        attention_dropout=0.0,
        max_position_embeddings=64,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
    )
    model = M2M100ForConditionalGeneration(config).eval()
    choose = random.Random(0)
    asked = [(form.format(word), n) for n, word in enumerate(WORDS, start=1) for form in FORMS]
    pairs = [
        (text, f"#{number if choose.random() < RIGHT_SHARE else choose.randint(1, len(WORDS))}")
        for text, number in asked * 20
    ]
    settings = WarmupSettings(updates=400, rows_per_update=32, learning_rate=3e-3, seed=0)
    list(warm_up(model, tokenizer, pairs, settings))
    for saved in (model, tokenizer):
        saved.save_pretrained(data / "numbers-model")
    choose.shuffle(asked)
    count = len(asked) * 5 // 6
    (data / "numbers").mkdir()
    for part, rows in (("train", asked[:count]), ("eval", asked[count:])):
        lines = [json.dumps({"prompt": text, "answer": str(number)}) for text, number in rows]
        (data / "numbers" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def parameters(case: dict[str, Any], seed: int, dtype: str) -> dict[str, Any]:
    """Returns the parameters of a run: one arm of the case's recipe, for one round."""
    written = read_written()
    recipe = read_content(ROOT / "recipes" / f"{case['recipe']}.yaml")
    params = merge(recipe, case["parameters"], frozenset(case["without"]))
    arm = params["arms"][case["arm"]]
    training = {**arm["training"], **written["training"], **case["training"]}
    prompts = case["prompts_per_iteration"] * training["iterations_per_round"]
    arm = {
        **arm,
        "curriculum": [
            {"split_at_random": {"phases": 1, "prompts_per_phase": prompts}},
            {"fix_group_size": {"rollouts": case["rollouts_per_group"]}},
        ],
        "objective": [*written["objective"], *arm["objective"]],
        "training": training,
    }
    return {
        **params,
        "seed": seed,
        "machine": {**params["machine"], "dtype": dtype},
        "arms": {ARM: arm},
        "rounds": {ROUND: {"arm": ARM, "start": BASE, "phase": 1}},
    }


def measure(workspace: Path) -> Run:
    """Returns the rewards of a run before and after training, and its drift by update."""
    with chdir(workspace):  # where the link is
        params = read_params()
        objective = build_objective(params.arms[ARM].objective, ARM)
    artifacts = workspace / "artifacts"
    updates = pd.read_csv(artifacts / "training" / ROUND / "updates.csv")
    # As in the trust region: per dimension of a sample, or per token of a chunk.
    scales = [link for link in objective.links if link.name == "scale_log_ratio"]
    dimensions = int(scales[0].settings["dimensions"] or 1) if scales else 1
    drift = drift_by_update(
        workspace / record_drift.FOLDER, updates["trained_rollouts"].tolist(), dimensions
    )
    return {
        "reward_of_base": read_reward(artifacts, BASE),
        "reward": read_reward(artifacts, ROUND),
        "trust_range": min(trusted_ranges(objective).values()),
        "drift_max": read_json(artifacts / "training" / ROUND / "summary.json")["drift_max"],
        "trained_steps": int(updates["trained_steps"].sum()),
        "updates": {
            **{
                name: [None if np.isnan(each) else round(each, DIGITS) for each in updates[name]]
                for name in METRICS
            },
            **drift,
        },
    }


def read_reward(artifacts: Path, name: str) -> float:
    """Returns what an evaluation measures of what training maximizes: a score, or the outcome."""
    found = read_json(artifacts / "evaluations" / f"{name}.json")
    scores = [each for key, each in found.items() if key.startswith("score.")]
    return float((scores or [found["mean_at_k"]])[0]["value"])


def drift_by_update(
    folder: Path, rollouts: list[int], dimensions: int
) -> dict[str, list[float | None]]:
    """Returns statistics of |difference| of log-probs of every update's trained steps.

    None of an update without trained steps.

    Args:
      folder: What the link has written, by microbatch.
      rollouts: Number of trained rollouts of each update.
      dimensions: By which differences are divided.

    Raises:
      SystemExit: If the files are not those of these updates.
    """
    parts = [read_tensors(file) for file in sorted(folder.glob("*.safetensors"))]
    if sum(len(part["mask"]) for part in parts) != sum(rollouts):
        raise SystemExit(f"{folder}: is not of one whole training; remove its workspace")
    found: dict[str, list[float | None]] = {}
    for count in rollouts:
        own, rows = [], 0
        while rows < count:
            own.append(parts.pop(0))
            rows += len(own[-1]["mask"])
        for name, value in _statistics(own, dimensions).items():
            found.setdefault(name, []).append(None if value is None else round(value, DIGITS))
    return found


def _statistics(parts: list[dict[str, Tensor]], dimensions: int) -> dict[str, float | None]:
    """Returns the statistics of one update."""

    def of(names: tuple[str, ...]) -> FloatArray:
        kept = [
            torch.stack([part[name].double() for name in names]).sum(dim=0)[part["mask"] != 0]
            for part in parts
        ]
        return torch.cat(kept).numpy()

    found: dict[str, float | None] = {}
    for pair, names in PAIRS.items():
        size = np.abs(of(names)) / dimensions if parts else None
        found[f"{pair}, mean"] = None if size is None else float(size.mean())
        found[f"{pair}, p{TAIL}"] = None if size is None else float(np.percentile(size, TAIL))
    weight_max = read_written()["objective"][1]["truncate_mismatch"]["weight_max"]
    is_truncated = np.exp(of(PAIRS["behavior and proximal"])) > weight_max if parts else None
    found["truncated_fraction"] = None if is_truncated is None else float(is_truncated.mean())
    return found


def summarize(runs: dict[str, dict[str, dict[str, Run]]]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals, and which targets are met, by case."""
    targets = read_written()["targets"]
    found = {}
    for name in next(iter(runs.values())):
        pairs = [run[name] for run in runs.values()]
        by_dtype = {dtype: _summarize_dtype([pair[dtype] for pair in pairs]) for dtype in DTYPES}
        difference = mean_interval([_gain(pair[BFLOAT16]) - _gain(pair[FLOAT32]) for pair in pairs])
        rises = {
            dtype: (each["gain"]["low"] or 0.0) > targets["gain_above"]
            for dtype, each in by_dtype.items()
        }
        allowed = targets["difference_in_gains"] * by_dtype[FLOAT32]["gain"]["value"]
        drift = by_dtype[BFLOAT16][f"behavior and proximal, p{TAIL}"]["value"]
        clip = by_dtype[BFLOAT16]["trust_range"]
        found[name] = {
            **by_dtype,
            "difference": difference,
            "train_cpu_ratio": mean_interval(
                [
                    pair[BFLOAT16]["train_cpu_seconds"] / pair[FLOAT32]["train_cpu_seconds"]
                    for pair in pairs
                ]
            ),
            "met": {
                "float32 rises": rises[FLOAT32],
                "bfloat16 rises": rises[BFLOAT16],
                "equal gains": abs(difference["value"] or 0.0) <= allowed,
                "small drift": drift <= targets["drift_per_clip"] * clip,
            },
        }
    return found


def _summarize_dtype(runs: list[Run]) -> dict[str, Any]:
    """Returns intervals over seeds of the means over updates."""
    names = [name for name in runs[0]["updates"] if name not in ("ratio_min", "ratio_max")]
    trusted = runs[0]["trust_range"]
    return {
        "base": mean_interval([run["reward_of_base"] for run in runs]),
        "gain": mean_interval([_gain(run) for run in runs]),
        "trust_range": trusted,
        "drift_max": max(run["drift_max"] for run in runs),
        # What rule U27 would refuse without a correction.
        "refused": sum(trusted <= MIN_CLIP_PER_DRIFT * run["drift_max"] for run in runs),
        "seeds": len(runs),
        "ratio_min": min(min(run["updates"]["ratio_min"]) for run in runs),
        "ratio_max": max(max(run["updates"]["ratio_max"]) for run in runs),
        **{name: mean_interval([_mean(run["updates"][name]) for run in runs]) for name in names},
    }


def _gain(run: Run) -> float:
    return float(run["reward"] - run["reward_of_base"])


def _mean(values: list[float | None]) -> float:
    """Returns the mean over updates that trained steps."""
    return float(np.mean([each for each in values if each is not None]))


def gains_table(results: dict[str, Any]) -> str:
    """Returns gains in reward by case, their difference, CPU seconds and targets as Markdown."""
    titles = ["modality", "base", "gain, float32", "gain, bfloat16", "bfloat16 - float32"]
    titles += ["CPU s of training, ratio", "rises: float32, bfloat16", "equal gains", "small drift"]
    rows = []
    for name, each in results["summary"].items():
        gains = [in_words(each[dtype]["gain"]) for dtype in DTYPES]
        met = {key: "yes" if value else "no" for key, value in each["met"].items()}
        cells = [name, f"{each[FLOAT32]['base']['value']:.3f}", *gains]
        cells += [in_words(each["difference"]), in_words(each["train_cpu_ratio"], ".2f")]
        cells += [f"{met['float32 rises']}, {met['bfloat16 rises']}"]
        rows.append([*cells, met["equal gains"], met["small drift"]])
    return markdown_table(titles, rows)


def drift_table(results: dict[str, Any]) -> str:
    """Returns means over updates and seeds of each dtype's drift by case as Markdown."""
    titles = ["modality", "dtype", *(f"{pair}, mean / p{TAIL}" for pair in PAIRS)]
    titles += ["k3", "ratio", "clipped", "truncated", "largest drift", "clip range", "U27 refuses"]
    rows = []
    for name, case in results["summary"].items():
        for dtype in DTYPES:
            each = case[dtype]
            spread = [
                " / ".join(f"{each[f'{pair}, {of}']['value']:.2g}" for of in ("mean", f"p{TAIL}"))
                for pair in PAIRS
            ]
            means = {
                key: each[key]["value"]
                for key in ("kl_to_start", "clip_fraction", "truncated_fraction")
            }
            cells = [name, dtype, *spread, f"{means['kl_to_start']:.2g}"]
            cells += [f"{each['ratio_min']:.3f} to {each['ratio_max']:.3f}"]
            cells += [f"{means[key]:.2%}" for key in ("clip_fraction", "truncated_fraction")]
            cells += [f"{each['drift_max']:.2g}", f"{each['trust_range']:g}"]
            rows.append([*cells, f"{each['refused']} of {each['seeds']}"])
    return markdown_table(titles, rows)


if __name__ == "__main__":
    main()
