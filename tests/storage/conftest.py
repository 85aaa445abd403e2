"""A real S3 server as a process of its own, and a proxy before it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.storage import proxy as proxies
from tests.storage.transfers import PART_BYTES

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIANEVERTOBESHOWN",
    "AWS_SECRET_ACCESS_KEY": "secret-never-to-be-shown",
    "AWS_SESSION_TOKEN": "token-never-to-be-shown",
}


@pytest.fixture(scope="session")
def server_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(PART_BYTES)},
        stdout=log,
        stderr=log,
    )
    with log, process:
        while not _answers(port):
            assert process.poll() is None, Path(log.name).read_text()
            time.sleep(0.05)
        yield port
        process.kill()


def _answers(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def shared_proxy(server_port: int) -> Iterator[proxies.Proxy]:
    with proxies.running(server_port) as opened:
        yield opened


@pytest.fixture
def proxy(
    shared_proxy: proxies.Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> proxies.Proxy:
    """What S3 is for the library, and for the processes that a test starts."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    here = {
        "AWS_ENDPOINT_URL_S3": shared_proxy.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
    }
    for name, value in {**here, **SECRETS}.items():
        monkeypatch.setenv(name, value)
    shared_proxy.clear()
    return shared_proxy


@pytest.fixture
def client(proxy: proxies.Proxy) -> Iterator[Any]:
    """A client of the server itself, past the proxy."""
    url = f"http://127.0.0.1:{proxy.server_port}"
    opened = boto3.client("s3", endpoint_url=url)
    yield opened
    opened.close()


@pytest.fixture
def bucket(client: Any, tmp_path: Path) -> str:
    name = f"bucket-{abs(hash(tmp_path)):x}"
    client.create_bucket(Bucket=name)
    return name
