"""`python -m flows.team`: runs UIs, S3, a worker and prefect.yaml's deployments until Ctrl-C."""

import argparse
import os
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from flows.server import HOST, chosen_port, free_port, running_server, s3_server
from flows.sharing import OWN, remote_of, use_store
from flows.ui import MLFLOW, PREFECT, open_pages, serve_until_stopped
from grpo.errors import ArtifactError

PREFECT_FILE = Path("prefect.yaml")
POOL = "grpo"
OBJECTS = Path(".s3")  # persistent storage of S3
S3_PORT = 8333
POLL_SECONDS = 2.0  # between a worker's polls for scheduled runs


def main() -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 2 if a server or the worker cannot start."""
    return serve_until_stopped(lambda stack: _start(Path.cwd(), stack))


def _start(workspace: Path, stack: ExitStack) -> dict[str, str]:
    pages = open_pages(workspace, stack)
    given = {
        "PREFECT_API_URL": f"{pages[PREFECT]}/api",
        "MLFLOW_TRACKING_URI": pages[MLFLOW],
        "GRPO_WORKSPACE": str(workspace),  # working directory of runs, see prefect.yaml
        "GRPO_REPOSITORY": str(workspace),  # repository from which remote stages fetch commits
    }
    remote = open_remote(workspace, stack)
    stack.enter_context(prefect_worker(given))  # before the deployment: it creates the work pool
    _prefect({**os.environ, **given}, "deploy", "--all", "--prefect-file", str(PREFECT_FILE))
    return {**pages, "remote": remote, "worker": f"work pool {POOL}, runs in {workspace}"}


def open_remote(workspace: Path, stack: ExitStack) -> str:
    """Starts S3 unless the repository has its own default remote; returns the remote's URL."""
    remote = remote_of(workspace)
    if remote not in (None, OWN):
        return remote.url
    address = stack.enter_context(
        s3_server(workspace / OBJECTS, chosen_port("GRPO_S3_PORT", S3_PORT))
    )
    use_store(workspace, address)
    return f"{OWN.url} at {address}, kept in {OBJECTS}"


def prefect_worker(given: dict[str, str]) -> AbstractContextManager[None]:
    """Runs a worker that executes scheduled flow runs, one at a time.

    The limit is the worker's, not the deployment's: on the server a killed run occupies its
    concurrency slot for minutes.

    Args:
      given: Environment of the worker and its runs, including PREFECT_API_URL.
    """
    port = free_port()
    extra = {
        "PREFECT_WORKER_QUERY_SECONDS": str(POLL_SECONDS),
        "PREFECT_WORKER_WEBSERVER_HOST": HOST,
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
    }
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    return running_server(
        [*command, "--type", "process", "--limit", "1", "--with-healthcheck"],
        name="prefect-worker",
        health=f"http://{HOST}:{port}/health",
        extra={**given, **extra},
    )


def _prefect(environment: dict[str, str], *words: str) -> None:
    """Runs a Prefect command.

    Raises:
      ArtifactError: If it fails; the message has its last line of output.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise ArtifactError(f"{PREFECT_FILE}: prefect {' '.join(words)}: {said[-1]}")


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.team", description=__doc__).parse_args()
    sys.exit(main())
