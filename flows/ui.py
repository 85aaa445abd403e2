"""`python -m flows.ui`: Prefect's and MLflow's pages on loopback until Ctrl-C."""

import fcntl
import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from flows.server import UI_LOCK, chosen_port, mlflow_server, prefect_server
from flows.settings import prepare_environment
from grpo.errors import BusyError, GrpoError

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
EXIT_WRONG_INPUT = 2


def main() -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 2 if a server cannot start.

    GRPO_PREFECT_PORT and GRPO_MLFLOW_PORT choose other ports; a usual port that is taken is
    replaced by a free one. While it runs, `python -m flows.reproduce` reports to this server.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with suppress(KeyboardInterrupt), ExitStack() as stack:
            _serve(Path.cwd(), stack)
    except GrpoError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


def _serve(workspace: Path, stack: ExitStack) -> None:
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
    file.write(json.dumps({"prefect": prefect, "mlflow": mlflow}))
    file.flush()
    print(f"Prefect {prefect}\nMLflow  {mlflow}\nCtrl-C stops both", flush=True)
    signal.pause()


if __name__ == "__main__":
    sys.exit(main())
