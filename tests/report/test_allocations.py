"""Laws of online allocations in the report."""

from pathlib import Path

import pytest
from finished_run import FLOPS, cost

from grpo.errors import ArtifactError
from grpo.params.parameters import Parameters
from grpo.report.allocations import allocations_by_arm, read_allocations
from grpo.report.page import PAGE, write_page
from grpo.report.reading import Run, read_run
from grpo.report.signal_figures import draw_allocation
from grpo.report.style import styled
from grpo.report.summary import describe
from grpo.runtime.artifacts.files import write_json

COUNTS = {"skipped": 0, "sampled": 9, "reused": 0, "oversampling_factor": 1.0}


def record(groups: int, rollouts: int, mixed: float, flops: float, solved: int) -> dict:
    """Returns a record with all rollouts in the bin from 0.2 to 0.3."""
    bins = [
        {"low": each / 10, "share": 0.0, "rollouts": 0, "expected": None, "solved": None}
        for each in range(10)
    ]
    bins[2] |= {
        "share": 1.0,
        "rollouts": rollouts,
        "expected": 0.25,
        "solved": solved / rollouts,
    }
    return {
        "candidates": 10,
        "never_drawn": 10 - groups,
        "groups": groups,
        "rollouts": rollouts,
        "largest_group": 4,
        "expected_mixed": 0.5,
        "mixed": mixed,
        "effective_sample_size": groups / 2,
        "cost_unit": "FLOPs",
        "expected_cost": 1e9,
        "cost": flops,
        "bins": bins,
    }


@pytest.fixture
def allocating(artifacts: Path, params: Parameters) -> Parameters:
    """Returns the parameters of a finished run whose first arm allocates online."""
    records = [record(4, 10, 0.25, 2e9, 2), record(6, 30, 0.5, 3e9, 12)]
    for name, each in zip(params.rounds_of("uniform"), records):
        sampling, _ = FLOPS["uniform"]
        path = artifacts / f"rollouts/{name}/summary.json"
        write_json(path, {"cost": cost(sampling), "selection": COUNTS})
        write_json(artifacts / f"training/{name}/allocation.json", each)
    arm = params.arms["uniform"].model_copy(
        update={"selection": [{"allocate_by_signal": {"budget": 1e9}}]}
    )
    return params.model_copy(update={"arms": {**params.arms, "uniform": arm}})


@pytest.fixture
def run(artifacts: Path, allocating: Parameters) -> Run:
    return read_run(artifacts, allocating)


def test_numbers_of_an_arm_are_those_of_all_iterations(run: Run):
    found = allocations_by_arm(run)
    assert set(found) == {"uniform"}
    each = found["uniform"]
    assert (each.groups, each.rollouts) == (10, 40)
    assert each.mixed == pytest.approx((4 * 0.25 + 6 * 0.5) / 10)
    assert each.effective_share == pytest.approx(0.5)
    assert each.never_drawn == pytest.approx(0.4)  # after the last iteration
    assert (each.expected_cost, each.cost) == (2e9, 5e9)
    assert each.bins[2] == pytest.approx((0.2, 1.0, 0.25, 14 / 40))
    assert sum(part.share for part in each.bins) == pytest.approx(1)


def test_the_figure_is_drawn_of_these_numbers(run: Run, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(
        "grpo.report.signal_figures.Canvas.svg", lambda self, *_: drawn.append(self) or "<svg/>"
    )
    with styled():
        assert draw_allocation(run, {}) is None
        draw_allocation(run, allocations_by_arm(run))
    shares, rates = drawn[0].subplots
    heights = [bar.get_height() for bar in shares.patches]
    assert heights == [part.share for part in allocations_by_arm(run)["uniform"].bins]
    assert rates.lines[0].get_ydata()[2] == pytest.approx(14 / 40)


@pytest.mark.usefixtures("figures_drawn_once")
def test_the_page_and_the_summary_show_them(artifacts: Path, allocating: Parameters):
    write_page(artifacts, allocating, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    assert "<h2>Allocations</h2>" in page
    row = page[page.index('id="allocations"') :]
    assert "1.00\N{NO-BREAK SPACE}GFLOP" in row
    arms = describe(artifacts, allocating)["arms"]
    assert arms["sgpo"]["allocation"] is None
    assert arms["uniform"]["allocation"]["mixed"] == pytest.approx(0.4)
    assert arms["uniform"]["allocation"]["cost"] == 5e9


@pytest.mark.usefixtures("figures_drawn_once")
def test_a_run_without_an_allocation_has_no_such_section(artifacts: Path, params: Parameters):
    write_page(artifacts, params, artifacts / "report")
    assert "Allocations" not in (artifacts / "report" / PAGE).read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"training/uniform-1/allocation\.json: 'bins' is missing"),
        ({**record(1, 2, 0.0, 1.0, 0), "mixed": "x"}, r"allocation\.json: 'mixed' is missing"),
    ],
)
def test_a_broken_record_is_named(artifacts: Path, run: Run, content: dict, message: str):
    write_json(artifacts / "training/uniform-1/allocation.json", content)
    with pytest.raises(ArtifactError, match=message):
        read_allocations(run)
