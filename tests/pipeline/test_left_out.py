"""`grpo left-out`: the signal of prompts that a round did not train on."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.__main__ import main
from grpo.advice.left_out import prompt_rates

RATE = 0.3
TITLE = "| training prompts | all | drawn | solved | p (1 - p) | mixed groups |"


def run(
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
) -> tuple[object, str, str]:
    """Runs the command in a workspace; returns its exit code and what it printed."""
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["grpo", "left-out", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_the_variance_of_an_outcome_is_estimated_without_bias():
    """Closed form: the expectation over all groups of four rollouts, each weighed by its chance."""
    mean = 0.0
    for outcomes in itertools.product([0.0, 1.0], repeat=4):
        chance = np.prod([RATE if each else 1 - RATE for each in outcomes])
        rates = prompt_rates(pd.DataFrame({"prompt_id": "one", "outcome": outcomes}))
        mean += float(chance) * float(rates["signal"].iloc[0])
    assert mean == pytest.approx(RATE * (1 - RATE))


def test_every_training_prompt_is_counted_once_by_what_the_round_did_with_it(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, out, _ = run(finished, monkeypatch, capsys, "sgpo-1", "--prompts", "5")
    assert code == 0
    lines = out.splitlines()
    rows = [line.split(" | ") for line in lines[lines.index(TITLE) + 2 :] if line.startswith("| ")]
    found = {row[0].removeprefix("| "): int(row[1]) for row in rows}
    artifacts = finished / "artifacts"
    everything = pd.read_parquet(artifacts / "prompts" / "train.parquet")["prompt_id"]
    planned = set(pd.read_parquet(artifacts / "curricula" / "sgpo.parquet")["prompt_id"])
    trained = set(pd.read_parquet(artifacts / "rewards" / "sgpo-1.parquet")["prompt_id"])
    expected = {
        "the round trained on": len(trained),
        "in the arm's curriculum, not trained on": len(planned - trained),
        "not in the arm's curriculum": len(set(everything) - planned),
    }
    assert found == {kind: count for kind, count in expected.items() if count}
    assert all(int(row[2]) == min(5, int(row[1])) for row in rows)


def test_the_same_seed_prints_the_same_table(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first, again, other = (
        run(finished, monkeypatch, capsys, "uniform-1", "--prompts", "8", "--seed", seed)[1]
        for seed in ("0", "0", "1")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "params.yaml: rounds.nowhere is missing, there are "),
        (["sgpo-1", "--prompts", "0"], "--prompts: must be >= 1, got 0"),
    ],
)
def test_a_wrong_argument_is_one_line(
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
):
    code, out, error = run(finished, monkeypatch, capsys, *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(said)
