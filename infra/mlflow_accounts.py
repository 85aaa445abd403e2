"""Creates the account of workers on MLflow's server: it records runs and cannot move aliases.

    python infra/mlflow_accounts.py

MLFLOW_TRACKING_URI, _USERNAME and _PASSWORD are those of the administrator, MLFLOW_WORKER_PASSWORD
is the account's. Running it again sets the password and restores the permissions.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.server.auth.client import AuthServiceClient

from grpo.errors import brief
from grpo.lineage.record import EXPERIMENT

WORKER = "worker"
# The server's default is READ: of registered models the worker sees all and changes none. EDIT on a
# model would also allow to set its aliases.
PERMISSION = "EDIT"


def main() -> None:
    """Creates the account; an error of MLflow becomes one line on stderr and exit code 1."""
    address, password = os.environ["MLFLOW_TRACKING_URI"], os.environ["MLFLOW_WORKER_PASSWORD"]
    try:
        make_worker(AuthServiceClient(address), MlflowClient(address), password)
    except MlflowException as error:
        print(f"{address}: cannot make the account {WORKER}, {brief(error)}", file=sys.stderr)
        sys.exit(1)


def make_worker(accounts: AuthServiceClient, client: MlflowClient, password: str) -> None:
    """Creates the experiment and the user, or sets its password; grants EDIT on the experiment.

    The administrator creates the experiment, because whoever does may also delete it.
    """
    found = client.get_experiment_by_name(EXPERIMENT)
    experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
    with suppress_code("RESOURCE_ALREADY_EXISTS"):
        accounts.create_user(WORKER, password)
    accounts.update_user_password(WORKER, password)
    with suppress_code("RESOURCE_DOES_NOT_EXIST"):  # a permission that exists cannot be granted
        accounts.revoke_user_permission(WORKER, "experiment", experiment)
    accounts.grant_user_permission(WORKER, "experiment", experiment, PERMISSION)


@contextmanager
def suppress_code(code: str) -> Iterator[None]:
    """Ignores MLflow's errors of a code in the block."""
    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


if __name__ == "__main__":
    main()
