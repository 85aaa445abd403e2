"""Laws of rounds with a selection in the report."""

from pathlib import Path

import pytest
from finished_run import FLOPS, PROFILE_FLOPS, cost

from grpo.errors import ArtifactError
from grpo.params.parameters import Parameters
from grpo.report.numbers import cost_of
from grpo.report.page import PAGE, write_page
from grpo.report.reading import read_run
from grpo.report.words import format_selection
from grpo.runtime.artifacts.files import write_json

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

COUNTS = {"skipped": 0, "sampled": 9, "reused": 0, "oversampling_factor": 2.25}


def with_selection(params: Parameters, arm: str, selection: list) -> Parameters:
    changed = params.arms[arm].model_copy(update={"selection": selection})
    return params.model_copy(update={"arms": {**params.arms, arm: changed}})


def write_counts(artifacts: Path, name: str, counts: dict[str, float]) -> None:
    sampling, _ = FLOPS[name.split("-")[0]]
    path = artifacts / f"rollouts/{name}/summary.json"
    write_json(path, {"cost": cost(sampling), "selection": counts})


def test_the_page_shows_how_many_groups_a_kept_one_took(artifacts: Path, params: Parameters):
    write_counts(artifacts, "sgpo-1", COUNTS)
    resampling = [{"resample_uniform_groups": {"prompts": 2, "prompts_per_batch": 2}}]
    write_page(artifacts, with_selection(params, "sgpo", resampling), artifacts / "report")
    assert "2.2 groups sampled per group kept" in (artifacts / "report" / PAGE).read_text()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "2.2 groups sampled per group kept"),
        ({"oversampling_factor": 1.0}, ""),
        (
            {"oversampling_factor": 1.0, "skipped": 1200},
            "1\u202f200 candidates skipped",
        ),
        ({"oversampling_factor": 0.0, "sampled": 0, "reused": 9}, "rollouts of the profile"),
        (  # the first of several iterations
            {"oversampling_factor": 2 / 3, "sampled": 18, "reused": 9},
            "9 groups of the profile, then sampled ones",
        ),
    ],
)
def test_a_selection_in_words(counts: dict[str, float], said: str):
    assert format_selection({**COUNTS, **counts}) == said


def test_an_arm_that_trains_on_the_profile_pays_for_it(artifacts: Path, params: Parameters):
    """Its curriculum never reads the profile."""
    assert cost_of(read_run(artifacts, params), "uniform-1", "uniform")["flops"] == 100
    for name in ("uniform-1", "uniform-2"):
        write_counts(artifacts, name, COUNTS)
    reusing = with_selection(params, "uniform", ["reuse_profile_rollouts"])
    flops = cost_of(read_run(artifacts, reusing), "uniform-1", "uniform")["flops"]
    assert flops == 100 + PROFILE_FLOPS


def test_a_round_without_its_counts_is_named(artifacts: Path, params: Parameters):
    reusing = with_selection(params, "sgpo", ["reuse_profile_rollouts"])
    with pytest.raises(
        ArtifactError, match=r"rollouts/sgpo-1/summary.json: 'selection' is missing"
    ):
        read_run(artifacts, reusing)
