"""A team on this machine: servers, a worker and deployments by one command, driven over HTTP."""

import json
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flows.sharing import OWN, require_remote
from flows.team import open_remote
from grpo.errors import ParameterError
from grpo.lineage.lock import read_lock
from tests import tiny_pipeline
from tests.files import contents
from tests.flows.teams import MODEL, Team, processes_in
from tests.modalities.exposure import LOOPBACK, allowed_origin, listening

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
NAMES = {
    "reproduce/pipeline", "reproduce/nightly", "sweep/sweep", "promote/promote",
    "rollback/rollback", "stage/remote", "stage/remote-gpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def clone(promoted: Any, team: Team, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another member's clone, with nothing in DVC's cache and the team's remote."""
    target = tmp_path_factory.mktemp("member") / "clone"
    tiny_pipeline.run(team.workspace, "git", "clone", "-q", ".", str(target))
    config = (team.workspace / ".dvc/config.local").read_text()
    (target / ".dvc/config.local").write_text(config)
    return target


def test_a_team_that_was_killed_goes_on_to_the_same_bytes(
    done: dict[str, Any], team: Team, undisturbed: Path
) -> None:
    assert done["state_type"] == "COMPLETED", done["state"]
    # Stages that ran side by side stand in the order in which they ended.
    assert {**read_lock(team.workspace), "lineage": None} == {
        **read_lock(undisturbed),
        "lineage": None,
    }
    assert (team.workspace / ".work/marks.txt").read_text().count("start prepare") == 1


def test_a_run_that_was_killed_with_its_team_is_called_crashed_by_the_next(
    done: dict[str, Any], team: Team
) -> None:
    assert team.ended(team.lost_run)["state_type"] == "CRASHED"


def test_what_was_stored_outlives_a_team_that_was_killed(team: Team) -> None:
    with urllib.request.urlopen(f"{team.s3}/grpo/kept", timeout=30) as answer:
        assert answer.read() == b"by the team that was killed"


def test_pages_of_other_origins_cannot_use_s3(team: Team) -> None:
    assert allowed_origin(f"{team.s3}/grpo/kept", team.s3) == team.s3
    assert allowed_origin(f"{team.s3}/grpo/kept", "http://elsewhere.invalid") is None


def test_all_servers_of_a_team_listen_on_loopback(team: Team) -> None:
    assert listening() == {LOOPBACK}


def test_a_run_shows_its_stages_its_progress_and_where_the_report_is(
    done: dict[str, Any], team: Team
) -> None:
    rows = {row["stage"]: row["state"] for row in json.loads(team.artifact("stages", done["id"]))}
    assert rows["prepare"] == "Unchanged"
    assert {rows["train@a-1"], rows["report"], rows["lineage"]} == {"Completed"}
    assert team.artifact("progress", done["id"]) == 100
    page = str(team.workspace / "artifacts/report/index.html")
    assert page in team.artifact("report", done["id"])


def test_a_run_is_named_by_what_it_does_and_where_it_starts(
    done: dict[str, Any], team: Team, promoted: Any
) -> None:
    commits = tiny_pipeline.run(team.workspace, "git", "log", "--format=%h").split()
    assert done["name"] == f"all stages at {commits[1]}"  # the last one is of its results


def test_deployments_are_there_and_what_is_scheduled_is_planned(team: Team) -> None:
    assert set(team.deployments) == NAMES
    assert team.starts_of("reproduce/nightly") == {"03:00"}


def test_the_worker_promotes_a_policy_that_is_better(promoted: dict[str, Any], team: Team) -> None:
    assert (promoted["outcome"], promoted["version"]) == ("promoted", "2")
    assert promoted["state"] == "COMPLETED Promoted"
    assert promoted["reason"].endswith("over version 1")
    assert team.aliases() == {"champion": "2", "previous": "1"}


def test_a_refused_promotion_is_not_shown_as_completed(promoted: Any, team: Team) -> None:
    refused = team.decide("promote/promote", policy="a-2")
    assert (refused["outcome"], refused["state"]) == ("refused", "FAILED Refused")
    assert team.aliases() == {"champion": "2", "previous": "1"}


@pytest.mark.parametrize("given", [{"policy": ""}, {"policy": None}, {}])
def test_a_form_without_a_policy_moves_no_champion(
    promoted: Any, team: Team, given: dict[str, Any]
) -> None:
    try:
        state = team.run("promote/promote", model=MODEL, **given)["state_type"]
    except urllib.error.HTTPError as error:  # the server knows that it is needed
        state = "FAILED" if error.code < 500 else str(error)
        error.close()
    assert state == "FAILED"
    assert team.aliases() == {"champion": "2", "previous": "1"}


def test_after_a_rollback_on_the_worker_another_clone_loads_the_old_bytes_from_s3(
    clone: Path, team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = team.decide("rollback/rollback")
    assert (asked["outcome"], asked["state"]) == ("rolled back", "COMPLETED RolledBack")
    assert team.aliases() == {"champion": "1"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", team.mlflow)
    load = (sys.executable, "-m", "grpo", "load", f"models:/{MODEL}@champion")
    assert not (clone / ".dvc/cache").exists()
    tiny_pipeline.run(clone, *load, str(tmp_path / "loaded"))
    made = team.workspace / "artifacts/policies"
    assert contents(tmp_path / "loaded/policy") == contents(made / "a-1") != contents(made / "a-2")


def test_another_clone_pulls_all_artifacts_from_s3(clone: Path, team: Team) -> None:
    assert not (clone / "artifacts").exists()
    tiny_pipeline.run(clone, sys.executable, "-m", "dvc", "pull", "-q")
    made = contents(team.workspace / "artifacts")
    del made["report/index.html"]  # DVC does not track it
    assert contents(clone / "artifacts") == made


@pytest.mark.parametrize("url", ["/srv/own", OWN.url])
def test_a_team_keeps_to_a_default_remote_of_the_repository(fresh_pipeline: Path, url: str) -> None:
    with pytest.raises(ParameterError, match=r"core\.remote must name where to push"):
        require_remote(fresh_pipeline)
    with (fresh_pipeline / ".dvc/config").open("a") as config:
        config.write(f"    remote = own\n['remote \"own\"']\n    url = {url}\n")
    with ExitStack() as nothing:
        assert open_remote(fresh_pipeline, nothing) == url
    require_remote(fresh_pipeline)
    assert not (fresh_pipeline / ".dvc/config.local").exists()


def test_a_team_that_is_stopped_leaves_no_process(team: Team) -> None:
    team.process.terminate()
    assert team.process.wait(60) == 0
    assert processes_in(team.workspace) == []
