"""Runs stages on other hosts: a Prefect deployment run per stage, polled by this process.

Import it after `flows.settings.prepare_environment`; `python -m flows.reproduce --remote` does.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Crashed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.gpus import Slots
from flows.pipeline import MOST_STAGES, begun, bring_up_to_date, show, title
from flows.planning import Step
from flows.remote_lock import RemoteLock
from flows.remote_stage import ANSWER, BEAT, DEPLOYMENTS, LINES, UNREACHABLE, is_refusal
from flows.reproduction import Reproduction
from flows.runner import Outcome, Result, Runner, StageError, Stopped
from flows.wire import Answer, Order
from grpo.errors import ParameterError, brief

BEAT_TIMEOUT_SECONDS = 45.0  # without a heartbeat, after which another worker gets the stage
START_SECONDS = 600.0  # from accepting a stage to running it; a cluster may pull an image first
BEATS_PER_TIMEOUT = 9
POLL_SECONDS = 2.0
LINES_AT_ONCE = 200
TAKEN = "taken"  # tag of a run whose answer was merged or rejected


@flow(
    name="reproduce-remotely",
    flow_run_name=title,
    task_runner=ThreadPoolTaskRunner(max_workers=MOST_STAGES),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def reproduce_remotely(targets: Sequence[str] = (), at_once: int | None = None) -> None:
    """Brings dvc.lock up to date for the targets, by default all stages; downloads no data.

    Args:
      at_once: Maximum number of stages in flight; by default all.

    Raises:
      BusyError: If another reproduce, or a stage of one that was killed, runs in this workspace.
      ParameterError: If the workspace differs from its commit, or the deployment is missing.
      StageError: If a stage failed; stages that do not depend on it have run.
    """
    workspace = Path.cwd()
    with begun(workspace), get_client(sync_client=True) as client:
        lock = RemoteLock(workspace, targets)
        send = Dispatcher(client, show=show).send
        most = max(1, len(lock.steps)) if at_once is None else at_once
        runner = RemoteRunner(lock, send, at_once=most, show=show)
        bring_up_to_date(Reproduction(lock.steps, runner))


class RemoteRunner(Runner):
    """Sends stages to workers and merges the returned lock entries into dvc.lock.

    Args:
      send: Yields a worker's answer for validation; raises `Stopped` soon after the event is set.
    """

    def __init__(
        self,
        lock: RemoteLock,
        send: Callable[[Step, Order, threading.Event], AbstractContextManager[Answer]],
        *,
        at_once: int,
        show: Callable[[str, str], None],
    ) -> None:
        super().__init__(lock.workspace, at_once=at_once, show=show)
        self.lock = lock
        self.send = send

    def run_stage(self, step: Step) -> Result:
        # An upstream stage may have run and reproduced the same outputs.
        return Result.unchanged() if self.lock.is_fresh(step.name) else super().run_stage(step)

    @contextmanager
    def _gpus(self, step: Step) -> Iterator[Slots]:
        yield Slots(gpus=(), descriptors=())  # the worker's own

    def _attempt(self, step: Step, slots: Slots) -> Result:
        start = time.monotonic()
        with self.send(step, self.lock.order(step.name), self.stopped) as answer:
            if answer.error:
                raise StageError(f"{answer.error} on {answer.host}", code=answer.code)
            self.lock.merge(step.name, answer.entry)
        return Result(outcome=Outcome(answer.outcome), seconds=time.monotonic() - start)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """State of a run on Prefect's server."""

    state: State
    heartbeat: str  # text of the run's heartbeat artifact
    answer: Answer | None


class Dispatcher:
    """Sends orders to workers through Prefect's server."""

    def __init__(self, client: SyncPrefectClient, *, show: Callable[[str, str], None]) -> None:
        self.client = client
        self.show = show
        self.patience = {
            StateType.PENDING: START_SECONDS,
            StateType.RUNNING: BEAT_TIMEOUT_SECONDS,
            StateType.CANCELLING: BEAT_TIMEOUT_SECONDS,
        }
        try:
            self.deployments = [client.read_deployment_by_name(each).id for each in DEPLOYMENTS]
        except ObjectNotFound:
            raise ParameterError(
                f"prefect.yaml: deployments {', '.join(DEPLOYMENTS)} must be at {client.api_url}; "
                "prefect deploy --all"
            ) from None

    @contextmanager
    def send(self, step: Step, order: Order, stopped: threading.Event) -> Iterator[Answer]:
        """Yields a worker's answer to an order.

        Raises:
          StageError: If the run ended without an answer, or its heartbeat stopped.
          Stopped: If `stopped` was set; the run is then cancelled.
        """
        try:
            run = self.start(step, order)
        except UNREACHABLE as error:
            raise _refused(step, error) from None
        self.show(step.name, f"is run {run.id}, in queue {run.work_queue_name}")
        try:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # _watch retries itself
                answer = self._watch(step, run.id, stopped)
            yield answer
        except StageError:  # otherwise the next attempt would get the same run
            self._take(run.id)
            raise
        self._take(run.id)  # not after other errors: the answer can still be used

    def start(self, step: Step, order: Order) -> FlowRun:
        """Returns a run for the order: the existing run of a killed orchestrator, or a new one."""
        for number in itertools.count():
            run = self.client.create_flow_run_from_deployment(
                self.deployments[step.hints.gpu > 0],
                parameters={
                    "commit": order.commit,
                    "name": order.stage,
                    "entries": order.entries,
                    "beat_seconds": BEAT_TIMEOUT_SECONDS / BEATS_PER_TIMEOUT,
                },
                name=f"{order.stage} {order.commit[:8]}",
                idempotency_key=f"{order.digest}-{number}",
            )
            state = run.state
            assert state
            is_lost = state.is_cancelling() or (state.is_final() and not state.is_completed())
            if TAKEN not in run.tags and not is_lost:
                break
        return run

    def _take(self, run: UUID) -> None:
        with suppress(*UNREACHABLE):
            self.client.update_flow_run(run, tags=[TAKEN])

    def _watch(self, step: Step, run: UUID, stopped: threading.Event) -> Answer:
        """Polls a run until it ends; returns its answer.

        `silence` counts seconds, by this host's clock, during which the server answered and the
        run's state and heartbeat did not change.
        """
        lines, before, silence = 0, ("", ""), 0.0
        while not stopped.wait(POLL_SECONDS):
            try:
                status = self._read_status(run)
                lines = self._show_lines(step, run, lines)
            except UNREACHABLE as error:
                if is_refusal(error):
                    raise _refused(step, error) from None
                continue
            except ObjectNotFound:
                raise StageError(f"{step.name}: somebody deleted its run", code=1) from None
            if status.answer:
                return status.answer
            if status.state.is_final():
                said = brief(status.state.message or "without a reason")
                raise StageError(f"{step.name}: its run ended {status.state.name}, {said}", code=1)
            now = (status.state.type, status.heartbeat)
            silence = silence + POLL_SECONDS if now == before else 0.0
            before = now
            if silence > self.patience.get(status.state.type, float("inf")):
                self._give_up(step, run, status)
        with suppress(*UNREACHABLE):
            self.client.set_flow_run_state(run, Cancelling())
        raise Stopped("stopped")

    def _read_status(self, run: UUID) -> RunStatus:
        state = self.client.read_flow_run(run).state
        assert state
        # Read after the state: a run that has ended has already written all its artifacts.
        own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
        found = {each.key: each.data for each in self.client.read_artifacts(artifact_filter=own)}
        answer = Answer(**json.loads(str(found[ANSWER]))[0]) if ANSWER in found else None
        return RunStatus(state=state, heartbeat=str(found.get(BEAT, "")), answer=answer)

    def _show_lines(self, step: Step, run: UUID, seen: int) -> int:
        """Shows the run's new log lines; returns the number of lines logged so far."""
        while True:
            logs = self.client.read_logs(
                LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])),
                limit=LINES_AT_ONCE,
                offset=seen,
                sort=LogSort.TIMESTAMP_ASC,
            )
            for each in logs:
                if each.name.endswith(f".{LINES}"):
                    self.show(step.name, each.message)
            seen += len(logs)
            if len(logs) < LINES_AT_ONCE:
                return seen

    def _give_up(self, step: Step, run: UUID, status: RunStatus) -> None:
        """Marks the run as crashed, which frees its slot; a live worker then stops it.

        Raises:
          StageError: Always.
        """
        worker = f"its worker {status.heartbeat.partition(',')[0]}".strip()
        said = f"{worker} sent no heartbeat for {self.patience[status.state.type]:g} s"
        with suppress(*UNREACHABLE):
            self.client.set_flow_run_state(run, Crashed(message=said), force=True)
        raise StageError(f"{step.name}: {said}", code=1)


def _refused(step: Step, error: Exception) -> StageError:
    return StageError(f"{step.name}: Prefect's server, {brief(error)}", code=1)
