"""`python -m flows.ui`: runs the UIs of Prefect and MLflow on loopback until Ctrl-C."""

import argparse
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from flows.exits import exit_code
from flows.planning import require_pipeline
from flows.server import UI_LOCK, chosen_port, mlflow_server, prefect_server
from flows.settings import prepare_environment
from grpo.errors import BusyError, without_credentials

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
PREFECT, MLFLOW = "prefect", "mlflow"  # keys of UI_LOCK


def main() -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 2 if a server cannot start.

    GRPO_PREFECT_PORT and GRPO_MLFLOW_PORT set the ports; if a default port is taken, a free one is
    used. While the UIs run, `python -m flows.reproduce` reports to this Prefect server.
    """
    return serve_until_stopped(lambda stack: open_pages(Path.cwd(), stack))


def serve_until_stopped(start: Callable[[ExitStack], Mapping[str, str]]) -> int:
    """Starts servers, prints the URLs that `start` returns, and stops them after a signal."""

    def serve() -> int:
        with suppress(KeyboardInterrupt), ExitStack() as stack:
            for name, address in start(stack).items():
                print(f"{name:8}{without_credentials(address)}")
            print("Ctrl-C stops them", flush=True)
            signal.pause()
        return 0

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to ignore
    return exit_code(serve)


def open_pages(workspace: Path, stack: ExitStack) -> dict[str, str]:
    """Starts both servers, which stop when the stack closes; returns their URLs.

    Raises:
      ParameterError: If the working directory is not the pipeline's, or a given port is invalid.
      BusyError: If a given port is taken, or the UIs of this workspace are already running.
      ArtifactError: If a server does not start.
    """
    require_pipeline()
    prepare_environment(workspace)
    # Ports first: importing MLflow takes two seconds, and a wrong port should fail at once.
    prefect_port = chosen_port("GRPO_PREFECT_PORT", PREFECT_PORT)
    mlflow_port = chosen_port("GRPO_MLFLOW_PORT", MLFLOW_PORT)
    from grpo.lineage.record import open_store, tracking_uri

    lock = workspace / UI_LOCK
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context(lock.open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"{lock}: these pages are already open: {lock.read_text()}") from None
    os.truncate(lock, 0)
    prefect = stack.enter_context(prefect_server(prefect_port))
    mlflow = tracking_uri(workspace)
    if not mlflow.startswith("http"):
        open_store(workspace)  # the server must not race another process in the first migration
        mlflow = stack.enter_context(mlflow_server(mlflow, mlflow_port))
    addresses = {PREFECT: prefect, MLFLOW: mlflow}
    file.write(json.dumps({name: without_credentials(each) for name, each in addresses.items()}))
    file.flush()
    return addresses


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m flows.ui", description=__doc__).parse_args()
    sys.exit(main())
