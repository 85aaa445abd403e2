"""`python -m flows.ui`: Prefect's and MLflow's pages on loopback until Ctrl-C."""

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
PREFECT, MLFLOW = "prefect", "mlflow"  # whose addresses UI_LOCK holds


def main() -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 2 if a server cannot start.

    GRPO_PREFECT_PORT and GRPO_MLFLOW_PORT choose other ports; a usual port that is taken is
    replaced by a free one. While it runs, `python -m flows.reproduce` reports to this server.
    """
    return serve_until_stopped(lambda stack: open_pages(Path.cwd(), stack))


def serve_until_stopped(start: Callable[[ExitStack], Mapping[str, str]]) -> int:
    """Starts servers, says the addresses that `start` returns, and ends them after a signal."""

    def serve() -> int:
        with suppress(KeyboardInterrupt), ExitStack() as stack:
            for name, address in start(stack).items():
                print(f"{name:8}{without_credentials(address)}")
            print("Ctrl-C stops them", flush=True)
            signal.pause()
        return 0

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    return exit_code(serve)


def open_pages(workspace: Path, stack: ExitStack) -> dict[str, str]:
    """Starts both servers for as long as the stack is open; returns their addresses.

    Raises:
      ParameterError: If the working directory is not the pipeline's, or a chosen port is no port.
      BusyError: If a chosen port is taken or the pages of this workspace are already open.
      ArtifactError: If a server does not start.
    """
    require_pipeline()
    prepare_environment(workspace)
    # Here, not above: MLflow takes two seconds to import, a wrong port should not wait for it.
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
        open_store(workspace)  # the server must not race another process for the first migration
        mlflow = stack.enter_context(mlflow_server(mlflow, mlflow_port))
    addresses = {PREFECT: prefect, MLFLOW: mlflow}
    file.write(json.dumps({name: without_credentials(each) for name, each in addresses.items()}))
    file.flush()
    return addresses


if __name__ == "__main__":
    sys.exit(main())
