"""Laws of `grpo diff`: counts over all evaluation prompts, examples of those that are stored."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from finished_run import write_evaluation

from grpo.errors import ParameterError
from grpo.report.changes import compare_rounds
from grpo.runtime.artifacts.media import encode_png
from grpo.runtime.artifacts.tables import (
    EVALUATION,
    EVALUATION_SAMPLES,
    read_table,
    write_table,
)
from tests.terminals import run_on_terminal, without_settings


def change(path: Path, schema: object, **columns: object) -> None:
    write_table(read_table(path, schema).assign(**columns), path, schema)


def split_families(artifacts: Path, name: str) -> None:
    """Puts the first two of the four evaluation prompts into another family."""
    families = ["a", "a", "f", "f"]
    change(artifacts / f"evaluations/{name}.parquet", EVALUATION, family=families)
    of_rollouts = [each for each in families for _ in range(2)]
    path = artifacts / f"evaluations/{name}.samples.parquet"
    change(path, EVALUATION_SAMPLES, family=of_rollouts)


def test_fixed_and_broken_prompts_are_counted_by_family(artifacts: Path) -> None:
    """A greedy rollout is right if more than one of the prompt's four rollouts is."""
    write_evaluation(artifacts, "uniform-1", [0, 2, 2, 0])
    write_evaluation(artifacts, "sgpo-1", [2, 2, 1, 0])
    for name in ("uniform-1", "sgpo-1"):
        split_families(artifacts, name)
    text = compare_rounds(artifacts, "uniform-1", "sgpo-1")
    assert text.startswith(
        "sgpo-1 solves 2 of 4 evaluation prompts by its greedy rollout, uniform-1 solved 2: 1 are "
        "fixed and 1\nare broken.\n\n"
        "family  prompts  fixed  broken  before  after\n"
        "a       2        1      0       1       2\n"
        "f       2        0      1       1       0\n"
    )
    # The first two rollouts of each prompt are stored, and the first so many are right.
    assert "Of 8 sampled rollouts whose texts are stored, 2 are fixed and 1 are broken." in text
    assert [line for line in text.splitlines() if line.startswith(("fixed:", "broken:"))] == [
        "fixed: e0/0 (a)",
        "fixed: e0/1 (a)",
        "broken: e2/1 (f)",
    ]
    last = text[text.index("broken: e2/1") :].splitlines()
    assert last[1:3] == ["  prompt      2+1=", "  reference   2"]
    assert last[3].startswith("  before      uniform-1 wrote 1")
    assert any(line.startswith("  after       sgpo-1 wrote 1") for line in last)
    assert "\x1b" not in text


def test_the_other_way_round_fixed_is_broken(artifacts: Path) -> None:
    there = compare_rounds(artifacts, "base", "sgpo-1")
    back = compare_rounds(artifacts, "sgpo-1", "base")
    assert "base solved 2: 2 are fixed and 0 are" in there
    assert "sgpo-1 solved 4: 0 are fixed and 2 are" in back
    assert there.count("\nfixed: ") == back.count("\nbroken: ") > 0


def test_without_greedy_rollouts_most_sampled_ones_decide(artifacts: Path) -> None:
    for name, successes in (("base", [0, 2, 1, 4]), ("sgpo-1", [2, 1, 1, 4])):
        write_evaluation(artifacts, name, successes)
        change(artifacts / f"evaluations/{name}.parquet", EVALUATION, greedy=float("nan"))
    text = " ".join(compare_rounds(artifacts, "base", "sgpo-1").split())
    assert "solves 2 of 4 evaluation prompts in at least half of its sampled rollouts" in text
    assert "base solved 2: 1 are fixed and 1 are broken." in text


def test_pictures_of_which_nothing_was_read_are_named(artifacts: Path) -> None:
    for name in ("base", "sgpo-1"):
        path = artifacts / f"evaluations/{name}.samples.parquet"
        change(path, EVALUATION_SAMPLES, text="", image=encode_png(np.zeros((3, 2, 2), np.uint8)))
    text = re.sub(r"\s+", "", compare_rounds(artifacts, "base", "sgpo-1"))
    assert f"afternottext:PNGin{artifacts}/evaluations/sgpo-1.samples.parquet" in text


def test_only_prompts_that_both_answered_are_compared(artifacts: Path) -> None:
    path = artifacts / "evaluations/base.parquet"
    write_table(read_table(path, EVALUATION).head(3), path, EVALUATION)
    assert "sgpo-1 solves 3 of 3 evaluation prompts" in compare_rounds(artifacts, "base", "sgpo-1")
    renamed = read_table(path, EVALUATION).assign(prompt_id=["x", "y", "z"])
    write_table(pd.DataFrame(renamed), path, EVALUATION)
    said = compare_rounds(artifacts, "base", "sgpo-1")
    assert said == "base and sgpo-1 have no evaluation prompt in common"


def test_an_unknown_round_is_refused_with_the_known_ones(artifacts: Path) -> None:
    message = "^nope: is no evaluated round here; known: base, sgpo-1, uniform-1, uniform-2$"
    for names in (("nope", "base"), ("base", "nope")):
        with pytest.raises(ParameterError, match=message):
            compare_rounds(artifacts, *names)


@pytest.mark.long
def test_a_pager_is_used_on_a_terminal_only(artifacts: Path) -> None:
    command = [sys.executable, "-m", "grpo", "diff", "base", "sgpo-1"]
    environment = without_settings(os.environ, PAGER="sed s/^/paged:/")
    told = compare_rounds(artifacts, "base", "sgpo-1")
    workspace = artifacts.parent
    said = run_on_terminal(command, workspace, environment).replace("\r", "").splitlines()
    assert said == [f"paged:{line}" for line in told.splitlines()]
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{told}\n", "")


def test_an_unknown_round_is_one_line_and_wrong_input(artifacts: Path) -> None:
    command = [sys.executable, "-m", "grpo", "diff", "base", "nope"]
    done = subprocess.run(command, cwd=artifacts.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
