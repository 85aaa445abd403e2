"""Laws of audits in the report, on the run of finished_run.py."""

from pathlib import Path

import pytest
from finished_run import FLOPS, ReadWith, cost, write_updates

from grpo.errors import ArtifactError
from grpo.params.parameters import Parameters
from grpo.report.audits import audit_sentences, audits_by_arm, audits_by_round
from grpo.report.numbers import compute_numbers, cost_of
from grpo.report.page import PAGE, write_page
from grpo.runtime.artifacts.files import read_json, write_json

AUDIT_FLOPS = 33


@pytest.fixture
def audited(artifacts: Path) -> Path:
    """The run with three audits of uniform, one of them without cost."""
    write_updates(artifacts, "uniform-1", ["", "0.9,0.5", "0.7,0.7"])
    write_updates(artifacts, "uniform-2", ["1.0,1.0"])
    path = artifacts / "training/uniform-1/summary.json"
    write_json(path, {**read_json(path), "audit_cost": cost(AUDIT_FLOPS)})
    return artifacts


@pytest.mark.usefixtures("figures_drawn_once")
def test_a_run_without_audits_says_nothing_of_them(
    read_with: ReadWith, artifacts: Path, params: Parameters
) -> None:
    assert audits_by_round(read_with()) == audits_by_arm(read_with()) == {}
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    assert "honest" not in page
    assert "audits" not in page


def test_audits_are_averaged_by_round_and_by_arm(audited: Path, read_with: ReadWith) -> None:
    run = read_with()
    first, second = audits_by_round(run).values()
    assert (first.audits, first.cosine, first.lowest_cosine) == (2, pytest.approx(0.8), 0.7)
    assert (first.norm_ratio, first.flops) == (pytest.approx(0.6), AUDIT_FLOPS)
    assert (second.audits, second.is_full, second.flops) == (1, True, 0)
    (arm,) = audits_by_arm(run).values()
    # (0.9 + 0.7 + 1) / 3 and (0.5 + 0.7 + 1) / 3.
    assert (arm.cosine, arm.norm_ratio) == (pytest.approx(2.6 / 3), pytest.approx(2.2 / 3))


def test_a_gradient_that_was_lost_is_said_and_so_is_one_that_was_not(
    audited: Path, read_with: ReadWith
) -> None:
    (lossy,) = audit_sentences(audits_by_arm(read_with()))
    said = " ".join(lossy.split())  # without no-break spaces
    assert "In 3 audits, uniform's gradient had a cosine of 0.867 with the full one" in said
    assert "(lowest 0.700) and 73 % of its norm; the audits took 33 FLOP, outside" in said
    write_updates(audited, "uniform-1", ["1.0,1.0"])
    (full,) = audit_sentences(audits_by_arm(read_with()))
    assert (
        "The steps that uniform left out had no gradient: in 2 audits, its update equaled" in full
    )


def test_the_page_shows_audits_and_their_cost_beside_the_budget(
    audited: Path, read_with: ReadWith, params: Parameters
) -> None:
    run = read_with()
    assert cost_of(run, "uniform-2", "uniform")["flops"] == 2 * sum(FLOPS["uniform"])
    of_audits = compute_numbers(run).cost.set_index("stage").loc["audit@uniform-1"]
    assert (of_audits["kind"], of_audits["flops"]) == ("audit", AUDIT_FLOPS)
    write_page(audited, params, audited / "report")
    page = (audited / "report" / PAGE).read_text()
    assert '<section id="audits">' in page
    assert ">audits</text>" in page  # a bar of the cost figure


def test_a_gradient_without_a_full_one_to_compare_with_has_no_norm_ratio(
    artifacts: Path, read_with: ReadWith
) -> None:
    write_updates(artifacts, "uniform-1", ["0.0,", "0.5,0.25"])
    assert audits_by_round(read_with())["uniform-1"].norm_ratio == 0.25


def test_a_broken_audit_cost_is_named_in_one_line(artifacts: Path, read_with: ReadWith) -> None:
    write_json(artifacts / "training/uniform-1/summary.json", {"cost": cost(1)})
    with pytest.raises(ArtifactError, match=r"uniform-1/summary.json: 'audit_cost' is missing"):
        read_with()
