"""Fixtures that write the run of finished_run.py into an empty workspace."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from finished_run import (
    FLOPS,
    SUCCESSES,
    WARMUP_FLOPS,
    ReadWith,
    cost,
    write_evaluation,
    write_prompts,
    write_round,
)

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo.params.parameters import Parameters, RoundParams, read_params
from grpo.report.figures import draw_figures
from grpo.report.numbers import compute_numbers
from grpo.report.reading import Run, read_run
from grpo.report.style import Panel
from grpo.runtime.artifacts.files import write_json


@pytest.fixture(scope="session")
def params() -> Parameters:
    """The repository's parameters with two arms and three rounds."""
    own = read_params(SHORT_ROLLOUTS)
    arm = next(iter(own.arms.values()))
    training = arm.training.model_copy(
        update={"iterations_per_round": 1, "updates_per_iteration": 1}
    )  # of phases this small
    arm = arm.model_copy(update={"training": training})
    blind = arm.model_copy(
        update={
            "curriculum": [
                {"split_at_random": {"phases": 2, "prompts_per_phase": 2}},
                {"fix_group_size": {"rollouts": 2}},
            ]
        }
    )
    looking = arm.model_copy(
        update={
            "curriculum": [
                {"drop_trivial": {"above": 0.75}},
                {"size_groups_by_inverse_rate": {"smallest": 2, "largest": 4}},
                {"split_easy_to_hard": {"phases": 2}},
            ]
        }
    )
    rounds = {
        "uniform-1": RoundParams(arm="uniform", start="base", phase=1),
        "uniform-2": RoundParams(arm="uniform", start="uniform-1", phase=2),
        "sgpo-1": RoundParams(arm="sgpo", start="base", phase=1),
    }
    evaluation = own.evaluation.model_copy(
        update={"rollouts_per_prompt": 4, "confidence": 0.9, "bootstrap_resamples": 200}
    )
    return own.model_copy(
        update={
            "seed": 7,
            "arms": {"uniform": blind, "sgpo": looking},
            "rounds": rounds,
            "evaluation": evaluation,
        }
    )


@pytest.fixture(scope="session")
def judged(params: Parameters) -> Parameters:
    """The parameters when training maximizes a score: an evaluation then has that of the judge."""
    (judge,) = params.reward.judges
    judge = judge.model_copy(update={"judge": "ocr"})
    reward = params.reward.model_copy(update={"maximize": "score", "judges": [judge]})
    return params.model_copy(update={"reward": reward})


@pytest.fixture(scope="session")
def finished(params: Parameters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of the run, written once; tests must not change them."""
    artifacts = tmp_path_factory.mktemp("finished") / "artifacts"
    write_prompts(artifacts)
    write_json(artifacts / "training/base/summary.json", {"cost": cost(WARMUP_FLOPS)})
    write_evaluation(artifacts, "base", SUCCESSES["base"])
    for name, each in params.rounds.items():
        write_evaluation(artifacts, name, SUCCESSES[name])
        sampling, update = FLOPS[each.arm]
        write_round(artifacts, name, sampling=sampling, update=update)
    return artifacts


@pytest.fixture
def artifacts(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the artifacts that tests may change, in a workspace without .runs/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "artifacts")
    return tmp_path / "artifacts"


@pytest.fixture(scope="session")
def figures(finished: Path, params: Parameters) -> list[Panel]:
    """The figures of the finished run."""
    run = read_run(finished, params)
    return draw_figures(run, compute_numbers(run), usages={}, seconds={})


@pytest.fixture
def figures_drawn_once(figures: list[Panel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the figures, which take most of a page's time, for tests of other content."""
    monkeypatch.setattr("grpo.report.page.draw_figures", lambda *_, **__: figures)


@pytest.fixture
def read_with(artifacts: Path, params: Parameters) -> ReadWith:
    """Reads the run, with other successes of a policy or other parameters if given."""

    def read(successes: Mapping[str, list[int]] | None = None, params: Parameters = params) -> Run:
        for name, each in (successes or {}).items():
            write_evaluation(artifacts, name, each)
        return read_run(artifacts, params)

    return read
