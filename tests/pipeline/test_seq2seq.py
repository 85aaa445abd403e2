"""An encoder-decoder runs through every stage with two iterations per round, and learns."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration

from benchmarks.workspaces import ROOT, commands_in_order, make_workspace, run_stages
from grpo.modalities.seq2seq.bases import warm_up
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.shared.warmup import WarmupSettings
from grpo.params.parameters import read_params
from grpo.params.yaml import parse_yaml
from grpo.report.summary import describe
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import REWARDS, read_table
from grpo.runtime.artifacts.usage import Usage
from stages import report
from tests.files import contents

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
FORMS = {"train": "{}", "eval": "{}!"}  # of prompts


def make_base(target: Path) -> None:
    """Writes a model that gives the digit of a word in about a third of its answers."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    model = M2M100ForConditionalGeneration(
        M2M100Config(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.bos_token_id,
        )
    ).eval()
    choose = random.Random(0)
    pairs = [
        (form.format(word), f"#{digit if choose.random() < 0.4 else choose.randint(1, 9)}")
        for digit, word in list(enumerate(WORDS, start=1)) * 40
        for form in FORMS.values()
    ]
    settings = WarmupSettings(updates=600, rows_per_update=32, learning_rate=5e-3, seed=0)
    list(warm_up(model, tokenizer, pairs, settings))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def write_data(workspace: Path) -> None:
    """Writes what the parameters read under data/: the model and the prompts."""
    make_base(workspace / "data/words-model")
    (workspace / "data/words").mkdir()
    for part, asked in FORMS.items():
        lines = [
            json.dumps({"prompt": asked.format(word), "answer": str(digit)})
            for digit, word in enumerate(WORDS, start=1)
        ]
        (workspace / f"data/words/{part}.jsonl").write_text("\n".join(lines))


def stages_of(workspace: Path) -> list[str]:
    return [name for name, _, _ in commands_in_order(workspace)]


def params() -> dict[str, Any]:
    recipe: dict[str, Any] = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    recipe["policy"] = {
        "kind": "seq2seq",
        "base": {"source": "directory", "path": "words-model"},
        "lora": None,
        "recompute": False,
        "source_language": None,
        "forces_tag": False,
        "max_steps": 4,
    }
    recipe["task"] = {
        "kind": "jsonl",
        "directory": None,
        "train": "words/train.jsonl",
        "eval": "words/eval.jsonl",
        "columns": {},
        "instruction": "",
    }
    recipe["reward"]["answer_pattern"] = "#(.*)"
    first = {**recipe["reward"]["judges"][0], "judge": "math"}
    second = {**first, "judge": "exact", "weight": 0.2, "normalize": "z_score_in_group"}
    recipe["reward"]["judges"] = [first, second]
    recipe["evaluation"]["judges"] = [{"judge": "format", "model": None, "score_range": None}]
    recipe["evaluation"]["sampling"]["beams"] = 3
    recipe["evaluation"] |= {"rollouts_per_prompt": 256, "rollouts_per_batch": 1024}
    arm = recipe["arms"]["sgpo"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 8}},
        {"fix_group_size": {"rollouts": 64}},
    ]
    arm["training"] |= {
        "iterations_per_round": 2,
        "updates_per_iteration": 4,
        "learning_rate": 0.001,
    }
    recipe["arms"] = {"online": arm}
    recipe["rounds"] = {
        "online-1": {"arm": "online", "start": "base", "phase": 1},
        "online-2": {"arm": "online", "start": "online-1", "phase": 1},
    }
    return recipe


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own
def test_an_encoder_decoder_runs_through_every_stage_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_workspace(tmp_path, params())
    write_data(tmp_path)
    run_stages(tmp_path)
    monkeypatch.chdir(tmp_path)
    report.main(Usage(), Path("artifacts"), Path("artifacts/report"))
    found = read_json(Path("artifacts/report/metrics.json"))
    before, after = (
        each["mean_at_k"]["value"] for each in (found["base"], found["arms"]["online"])
    )
    # Of 2304 evaluation rollouts; 4 standard errors of a difference are at most 0.06.
    assert after - before > 0.06
    rewards = read_table(Path("artifacts/rewards/online-1.parquet"), REWARDS)
    assert {"score.math", "score.exact"} < set(rewards)
    (arm,) = describe(Path("artifacts"), read_params())["arms"].values()
    for judge in ("math", "exact"):  # of digits, they agree
        assert arm["judges"][f"score.{judge}"] == arm["mean_at_k"]
    searched = read_json(Path("artifacts/evaluations/online-2.json"))["beam"]
    assert searched.keys() == {"outcome", "score.math", "score.exact", "score.format"}
    assert searched["outcome"] == searched["score.math"]  # of digits
    assert arm["judges"]["greedy_score.format"]["base"]["value"] <= 1
    influence = arm["influence"]
    assert sum(each["share"] for each in influence.values()) == pytest.approx(1, abs=1e-5)
    assert influence["exact"]["share"] > 0.2 / 1.2  # a z-score differs more than what it is of
    assert influence["math"]["last_mean"] > influence["math"]["first_mean"]
    assert 0 < influence["math"]["spread"] <= 0.5  # of zeros and ones
    assert found["arms"]["online"]["influence"] == influence  # MLflow has what metrics.json has
    assert 'id="judges"' in Path("artifacts/report/index.html").read_text()
    trained = contents(Path("artifacts/policies/online-1"))
    for name in ("artifacts/policies/online-1", "artifacts/training/online-1"):
        Path(name).rename(tmp_path / name.replace("/", "-"))
    run_stages(tmp_path)
    assert contents(Path("artifacts/policies/online-1")) == trained


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dvc's own
def test_a_fresh_one_is_warmed_up_on_the_solutions_of_a_task(tmp_path: Path):
    recipe: dict[str, Any] = parse_yaml((ROOT / "recipes" / "smoke.yaml").read_text())
    base = recipe["policy"]["base"]
    recipe["policy"] = {**params()["policy"], "base": base, "max_steps": 6}
    recipe["evaluation"]["sampling"]["beams"] = 1
    base["architecture"] = "T5ForConditionalGeneration"
    base["config"] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    make_workspace(tmp_path, recipe)
    rounds = ("profile", "curriculum", "rollout", "score", "train", "evaluate")
    skipped = [each for each in stages_of(tmp_path) if each.partition("@")[0] in rounds]
    run_stages(tmp_path, skipped=skipped)
    updates = pd.read_csv(tmp_path / "artifacts/training/base/updates.csv")
    assert updates["loss"].iloc[-1] < 0.7 * updates["loss"].iloc[0]
