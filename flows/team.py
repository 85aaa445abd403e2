"""`python -m flows.team`: the pages, a worker and the deployments of prefect.yaml, until Ctrl-C."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from flows.server import HOST, free_port, running_server
from flows.ui import MLFLOW, PREFECT, open_pages, serve_until_stopped
from grpo.errors import ArtifactError

DEPLOYMENTS = Path("prefect.yaml")
POOL = "grpo"
POLL_SECONDS = "2"  # between a worker's questions for work


def main() -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 2 if something cannot start."""
    return serve_until_stopped(lambda stack: _start(Path.cwd(), stack))


def _start(workspace: Path, stack: ExitStack) -> dict[str, str]:
    pages = open_pages(workspace, stack)
    given = {
        "PREFECT_API_URL": f"{pages[PREFECT]}/api",
        "MLFLOW_TRACKING_URI": pages[MLFLOW],
        "GRPO_WORKSPACE": str(workspace),  # where prefect.yaml has runs take place
    }
    environment = {**os.environ, **given}
    _prefect(environment, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect(environment, "deploy", "--all", "--prefect-file", str(DEPLOYMENTS))
    stack.enter_context(prefect_worker(given))
    return {**pages, "worker": f"work pool {POOL}, runs in {workspace}"}


def prefect_worker(given: dict[str, str]) -> AbstractContextManager[None]:
    """Runs a worker that takes what is scheduled, one flow run at a time.

    Not a deployment's concurrency limit: a killed run keeps its place in the server's for minutes.

    Args:
      given: Environment of the worker and its runs, with the server's PREFECT_API_URL.
    """
    port = free_port()
    extra = {
        "PREFECT_WORKER_QUERY_SECONDS": POLL_SECONDS,
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
    """Runs a command of Prefect.

    Raises:
      ArtifactError: If it fails; with the last line that it said.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise ArtifactError(f"{DEPLOYMENTS}: prefect {' '.join(words)}: {said[-1]}")


if __name__ == "__main__":
    sys.exit(main())
