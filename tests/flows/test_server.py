"""Servers that flows start answer this machine, and no other page of its browser."""

from pathlib import Path

import pytest

from flows.reproduce import _reproduce_remotely
from flows.server import API_URL, _make_bucket, free_port, report_to_server
from grpo.errors import ArtifactError, ParameterError
from tests import tiny_pipeline
from tests.modalities.exposure import LOOPBACK, allowed_origin, listening

Environment = dict[str, str]


def test_prefect_listens_on_loopback_only(prefect_environment: Environment) -> None:
    assert listening() == {LOOPBACK}


def test_pages_of_other_origins_cannot_use_prefects_api(prefect_environment: Environment) -> None:
    health = f"{prefect_environment['PREFECT_API_URL']}/health"
    own = prefect_environment["PREFECT_API_URL"].removesuffix("/api")
    assert allowed_origin(health, own) == own
    assert allowed_origin(health, "http://elsewhere.invalid") is None


def test_a_server_that_does_not_answer_is_one_line(
    prefect_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses does answer."""
    own = prefect_environment[API_URL]
    for address in (own, f"{own}/nothing"):
        monkeypatch.setenv(API_URL, address)
        report_to_server(tmp_path)
    for address in (f"http://127.0.0.1:{free_port()}/api", "server:4200/api", "http://[/api"):
        monkeypatch.setenv(API_URL, address)
        with pytest.raises(ParameterError, match=r"^PREFECT_API_URL: no server answers at "):
            report_to_server(tmp_path)


def test_an_s3_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(ArtifactError, match=r"/grpo: cannot create the bucket, .*refused"):
        _make_bucket(f"http://127.0.0.1:{free_port()}/grpo")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_remote_runs_want_a_server_that_workers_ask(
    fresh_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_URL, raising=False)
    with (fresh_pipeline / ".dvc/config").open("a") as config:
        config.write("    remote = own\n['remote \"own\"']\n    url = /srv/own\n")
    tiny_pipeline.commit(fresh_pipeline, "a remote")
    with pytest.raises(ParameterError, match=r"^PREFECT_API_URL: must be the URL"):
        _reproduce_remotely([], None)
