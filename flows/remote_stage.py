"""The flow that a worker runs for one stage: sends heartbeats, then the answer.

Import it after `flows.settings.prepare_environment`; a worker's process has Prefect set up.
"""

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.runner import EXIT_WRONG_INPUT, StageError
from flows.wire import Answer, Order
from flows.worker import StageRun, home_of, repository_of
from grpo.errors import GrpoError, ParameterError

DEPLOYMENTS = ("stage/remote", "stage/remote-gpu")  # the second for stages that need GPUs
ANSWER, BEAT = "answer", "beat"  # keys of the run's artifacts
LINES = "stage"  # child logger for the stage's output
UNREACHABLE = (httpx.TransportError, httpx.HTTPStatusError)  # no answer, or an error status
BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


@flow(name="stage", persist_result=False, validate_parameters=False)
def stage(commit: str, name: str, entries: dict[str, Any], beat_seconds: float = 5.0) -> None:
    """Runs a stage of a commit in a separate clone and pushes its outs to DVC's remote.

    Args:
      entries: The entries in dvc.lock of the upstream stages: commands and outs.
      beat_seconds: Interval between heartbeats.

    Raises:
      GrpoError: If the stage failed; the reason is also an artifact of the run.
    """
    workspace = Path.cwd()
    lines = get_run_logger().getChild(LINES)  # type: ignore[union-attr] # a flow's run has one
    try:
        run = StageRun(
            Order(commit=commit, stage=name, entries=entries),
            workspace=workspace,
            home=home_of(workspace),
            repository=repository_of(workspace),
            show=lambda _, line: lines.info(line),
        )
        with _heartbeats(beat_seconds, give_up=run.stop):
            try:
                answer = run.carry_out()
            finally:
                run.stop()  # a signal may have interrupted it
    except GrpoError as error:
        _hand_back(Answer(host=platform.node(), error=str(error), code=_code(error)))
        raise
    _hand_back(answer)


def _code(error: GrpoError) -> int:
    """Returns the exit code that the stage would have in a local run."""
    if isinstance(error, StageError):
        return error.code
    return EXIT_WRONG_INPUT if isinstance(error, ParameterError) else 1


def _hand_back(answer: Answer) -> None:
    """Stores the answer as an artifact of the run; retries while the server is unreachable.

    Raises:
      HTTPStatusError: If the server refuses it.
    """
    APILogHandler().flush()  # the stage's log must be stored before the answer
    while True:
        try:
            create_table_artifact([asdict(answer)], key=ANSWER, description="For dvc.lock")
            return
        except UNREACHABLE as error:
            if is_refusal(error):
                raise
            time.sleep(1.0)


def is_refusal(error: httpx.HTTPError) -> bool:
    """Returns whether the server has refused a request, so that a retry would fail, too."""
    if not isinstance(error, httpx.HTTPStatusError):
        return False
    return error.response.is_client_error and error.response.status_code not in BUSY


@contextmanager
def _heartbeats(beat_seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Updates an artifact of the run every few seconds; calls `give_up` once the run has ended.

    The orchestrator checks only whether the artifact changes, so clocks need not agree.
    """
    run, ended = UUID(flow_run.id), threading.Event()

    def beat() -> None:
        # Retries in its own loop, so that it resumes as soon as the server is back.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True) as client,
        ):
            artifact, count = None, 0
            while not ended.wait(beat_seconds if count else 0):
                count += 1
                try:
                    artifact = artifact or _first(client, run)
                    text = f"on {platform.node()}, heartbeat {count}"
                    client.update_artifact(artifact, ArtifactUpdate(data=text))
                    state = client.read_flow_run(run).state
                except UNREACHABLE:
                    continue
                except ObjectNotFound:  # somebody deleted the run
                    give_up()
                    return
                if state and not state.is_running():
                    give_up()

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _first(client: SyncPrefectClient, run: UUID) -> UUID:
    made = client.create_artifact(ArtifactCreate(type="markdown", key=BEAT, flow_run_id=run))
    return made.id
