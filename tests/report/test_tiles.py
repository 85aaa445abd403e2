"""Laws of the tiles, the table of families and the header: what is shown equals the numbers."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from finished_run import SUCCESSES, ReadWith

from grpo.params.parameters import Parameters
from grpo.report.comparison import Curve, Interval
from grpo.report.numbers import changes_by_family, compare_arms, compute_numbers
from grpo.report.origin import read_origin
from grpo.report.page import PAGE, write_page
from grpo.report.tiles import NOT_TIMED, Tile, make_tiles
from grpo.report.verdict import verdict
from grpo.runtime.artifacts.files import ADDRESSES, write_bytes, write_json
from grpo.runtime.artifacts.tables import EVALUATION, read_table, write_table

SPACE = "\N{NO-BREAK SPACE}"


def answers(tile: Tile) -> dict[str, str]:
    return {line.arm: line.value for line in tile.lines}


def test_tiles_state_gain_cost_and_saving(read_with: ReadWith) -> None:
    run = read_with()
    learned, cost, cheaper = make_tiles(run, compute_numbers(run), {}, {})
    assert answers(learned) == {"uniform": "+0.500", "sgpo": "+0.625"}
    assert answers(cost) == {"uniform": f"200{SPACE}FLOP", "sgpo": f"100{SPACE}FLOP"}
    assert answers(cheaper) == {"sgpo": f"55{SPACE}% less FLOPs"}
    assert cost.lines[0].notes == (NOT_TIMED,)
    assert cheaper.lines[0].notes[-1] == NOT_TIMED
    assert "One training seed (7)" in learned.caveat
    # Two rounds of one update against one.
    assert "uniform 2, sgpo 1" in cost.caveat
    assert cheaper.caveat == "All arms have the same staleness (0)."


def test_savings_in_seconds_are_beside_those_in_flops(read_with: ReadWith) -> None:
    run = read_with()
    seconds = {
        "uniform": Curve(
            arm="uniform", policies=("base", "uniform-1", "uniform-2"), costs=(0.0, 30.0, 60.0)
        ),
        "sgpo": Curve(arm="sgpo", policies=("base", "sgpo-1"), costs=(0.0, 25.0)),
    }
    timed = compare_arms(run, seconds)
    _, cost, cheaper = make_tiles(run, compute_numbers(run), seconds, timed)
    assert cost.lines[0].notes == (f"1{SPACE}min{SPACE}00{SPACE}s here",)
    # sgpo reaches 0.75 after 0.8 * 25 = 20 s instead of 60 s.
    assert cheaper.lines[0].notes[-1].startswith(f"67{SPACE}% less time")
    (sentence,) = verdict(run, compute_numbers(run), seconds, timed)
    assert f"with 55{SPACE}% less compute and 67{SPACE}% less time" in sentence
    lower = read_with({"sgpo-1": [0, 0, 3, 3]})
    (sentence,) = verdict(
        lower, compute_numbers(lower), seconds, compare_arms(lower, seconds)
    )  # 25 of 60 s
    assert f"of uniform's compute and 42{SPACE}% of its time." in sentence


def test_the_arm_that_saved_most_is_named_first(read_with: ReadWith) -> None:
    run = read_with()
    numbers = compute_numbers(run)
    (found,) = numbers.comparisons.values()
    most = replace(found, arm="most", saving_fraction=Interval(value=0.9, low=0.8, high=0.95))
    for second in (found, replace(found, saving_fraction=None)):
        arms = {"sgpo": second, "most": most}
        said = verdict(run, replace(numbers, comparisons=arms), {}, {})
        assert [each.split()[0] for each in said] == ["most", "sgpo"]


def test_a_different_staleness_is_named(read_with: ReadWith, params: Parameters) -> None:
    run = read_with()
    arm = params.arms["sgpo"]
    training = arm.training.model_copy(update={"staleness": 1})
    arms = {**params.arms, "sgpo": arm.model_copy(update={"training": training})}
    stale = replace(run, params=run.params.model_copy(update={"arms": arms}))
    caveat = make_tiles(stale, compute_numbers(run), {}, {})[2].caveat
    assert caveat.startswith("Different staleness: uniform 0, sgpo 1.")


def test_changes_by_family_are_paired_means_of_the_prompts(
    artifacts: Path, read_with: ReadWith
) -> None:
    for name in SUCCESSES:
        path = artifacts / f"evaluations/{name}.parquet"
        table = read_table(path, EVALUATION).assign(family=["f", "f", "f", "g"])
        write_table(table, path, EVALUATION)
    run = read_with()
    found = changes_by_family(run)
    assert list(found) == list(SUCCESSES)
    assert {family: each.prompts for family, each in found["base"].items()} == {"f": 3, "g": 1}
    # Successes of four: base 0 0 2 and 2, sgpo-1 3 3 4 and 4.
    assert found["sgpo-1"]["f"].value == pytest.approx(10 / 12)
    assert found["sgpo-1"]["f"].change.value == pytest.approx(8 / 12)
    assert found["sgpo-1"]["g"].change.value == pytest.approx(2 / 4)
    assert found["base"]["g"].change.value == 0
    weighted = sum(each.prompts * each.change.value for each in found["sgpo-1"].values()) / 4
    assert weighted == pytest.approx(compute_numbers(run).gains["sgpo"]["mean_at_k"].value)


def test_the_header_names_what_is_known(
    params: Parameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")  # of a server that ends
    assert read_origin(params, tmp_path).facts == {
        "machine": "cpu, float32, 1 thread",
        "seed": "7",
    }
    write_json(tmp_path / ".runs/prepare.json", {})
    write_json(tmp_path / ADDRESSES, {"prefect": "http://127.0.0.1:1", "mlflow": "http://a@b"})
    origin = read_origin(params, tmp_path)
    assert origin.facts["date"].endswith(" UTC")
    assert origin.links == {"Prefect": "http://127.0.0.1:1"}  # no address with a password
    write_json(tmp_path / ADDRESSES, {})
    assert read_origin(params, tmp_path).links == {}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert read_origin(params, tmp_path).links == {"MLflow": "https://mlflow.example"}


def test_the_commit_is_that_of_the_last_stage_and_says_if_files_differed(
    params: Parameters, tmp_path: Path
) -> None:
    write_bytes(tmp_path / "dvc.yaml", b"stages: {prepare: {cmd: 'true'}}\n")
    write_bytes(tmp_path / "dvc.lock", b"schema: '2.0'\nstages:\n  prepare:\n    cmd: 'true'\n")
    assert "commit" not in read_origin(params, tmp_path).facts  # not in git
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "run"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert read_origin(params, tmp_path).facts["commit"] == head.stdout[:12]
    write_bytes(tmp_path / "dvc.lock", b"schema: '2.0'\nstages:\n  prepare:\n    cmd: 'false'\n")
    write_bytes(tmp_path / "dvc.yaml", b"stages: {prepare: {cmd: 'false'}}\n")
    commit = read_origin(params, tmp_path).facts["commit"]
    assert commit == f"{head.stdout[:12]} with uncommitted changes"


@pytest.mark.usefixtures("figures_drawn_once")
def test_the_page_shows_tiles_and_families_as_computed(artifacts: Path, params: Parameters) -> None:
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    tiles = re.findall(r'<section class="card tile">.*?</section>', page, re.DOTALL)
    assert len(tiles) == 3
    assert re.findall(r"<strong>([^<]*)</strong>", tiles[0]) == ["+0.500", "+0.625"]
    families = page.partition('<section id="families">')[2].partition("</section>")[0]
    assert "n = 4" in families
    cells = re.findall(r"var\(--(\w+)\) (\d+)%.*?>([\d.]+)<small>(\S+?)</small>", families)
    # The largest change, of sgpo-1, has all of the color, and others in proportion.
    assert cells == [
        ("blue", "16", "0.500", "+0.250"),
        ("blue", "32", "0.750", "+0.500"),
        ("blue", "40", "0.875", "+0.625"),
    ]
