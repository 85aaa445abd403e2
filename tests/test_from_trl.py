"""The code of the page for users of verl: its data become prompts, its compute_score a judge."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo.params.parameters import read_params
from grpo.rewards._reward_functions import judge_of_function
from grpo.rewards.base import JudgeInputs, Task
from grpo.tasks.jsonl import read_prompts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "from-trl.md"
CONVERT, SCORE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


def of_verl(question: str, answer: str, index: int) -> dict[str, Any]:
    """Returns a row as verl's examples write it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index},
    }


def test_files_of_verl_become_prompts_and_its_score_judges_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("data/verl").mkdir(parents=True)
    for part, offset in (("eval", 10), ("train", 0)):
        rows = [of_verl(f"What is {n} + 1?", str(n + 1), n) for n in range(offset, offset + 2)]
        pd.DataFrame(rows).to_parquet("train.parquet")
        exec(CONVERT, {})
        Path("data/verl/train.parquet").rename(f"data/verl/{part}.parquet")
    tables = read_prompts(
        train=Path("data/verl/train.parquet"),
        evaluation=Path("data/verl/eval.parquet"),
        instruction="",
        family="verl",
        columns={},
        takes_messages=True,
    )
    assert tables.train["answer"].tolist() == ["1", "2"]

    def compute_score(source: str, text: str, truth: str, extra: dict[str, Any]) -> float:
        assert (source, extra["split"]) == ("openai/gsm8k", "train")
        return float(text == truth)

    names: dict[str, Any] = {"compute_score": compute_score}
    exec(SCORE, names)
    judge = judge_of_function("plugins.verl_score", names["verl_score"])
    machine = read_params(ROOT / "params.yaml").machine
    inputs = JudgeInputs(
        where="judge", model=None, data=Path(), machine=machine, takes_messages=True
    )
    tasks = [
        Task(
            family=row["family"],
            prompt=row["prompt"],
            answer=row["answer"],
            entry=json.loads(row["entry"]),
        )
        for row in tables.train.to_dict("records")
    ]
    read: Any = judge.load(inputs)
    assert [each.score for each in read(["1", "3"], tasks)] == [1.0, 0.0]
