"""Servers that flows start answer this machine, and no other page of its browser."""

import urllib.request

from tests.exposure import LOOPBACK, listening

Environment = dict[str, str]


def allowed_origin(address: str, origin: str) -> str | None:
    """Returns the origin that a server lets use its API, asked as a browser asks first."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(address, headers=asked)
    with urllib.request.urlopen(request) as answer:
        found: str | None = answer.headers["Access-Control-Allow-Origin"]
        return found


def test_prefect_listens_on_loopback_only(prefect_environment: Environment) -> None:
    assert listening() == {LOOPBACK}


def test_pages_of_other_origins_cannot_use_prefects_api(prefect_environment: Environment) -> None:
    health = f"{prefect_environment['PREFECT_API_URL']}/health"
    own = prefect_environment["PREFECT_API_URL"].removesuffix("/api")
    assert allowed_origin(health, own) == own
    assert allowed_origin(health, "http://elsewhere.invalid") is None
