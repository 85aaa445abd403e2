"""Servers that flows start answer this machine, and no other page of its browser."""

from tests.exposure import LOOPBACK, allowed_origin, listening

Environment = dict[str, str]


def test_prefect_listens_on_loopback_only(prefect_environment: Environment) -> None:
    assert listening() == {LOOPBACK}


def test_pages_of_other_origins_cannot_use_prefects_api(prefect_environment: Environment) -> None:
    health = f"{prefect_environment['PREFECT_API_URL']}/health"
    own = prefect_environment["PREFECT_API_URL"].removesuffix("/api")
    assert allowed_origin(health, own) == own
    assert allowed_origin(health, "http://elsewhere.invalid") is None
