"""`python -m flows.reproduce [TARGET...]`: brings the pipeline up to date, as a Prefect flow."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.exits import exit_code
from flows.lineage import record_pending_lineage
from flows.live import console
from flows.planning import due_modules, plan, require_pipeline
from flows.preloaded import preloaded
from flows.remote_lock import RemoteLock
from flows.reproduction import reproduce_without_server, verdict_unchanged
from flows.runner import FLOW_LOCK, environment_of_stages, require_places
from flows.server import report_to_server, require_server
from flows.settings import prepare_environment
from grpo.runtime.artifacts.files import exclusive

REPORT = Path("artifacts/report/index.html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 after a failed stage, 2 if the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.reproduce", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="a stage or an output")
    parser.add_argument(
        "--at-once", type=int, help="parallel stages; default: processors, remotely all"
    )
    parser.add_argument("--quiet", action="store_true", help="only errors and the verdict")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--remote", action="store_true", help="run on workers of stage/remote")
    kind.add_argument(
        "--no-server",
        action="store_true",
        help="run without Prefect: no page of the run, which then starts some seconds earlier",
    )
    chosen = parser.parse_args(arguments)
    console.quiet = chosen.quiet
    act = _reproduce
    if chosen.remote:
        act = _reproduce_remotely
    elif chosen.no_server:
        act = _reproduce_without_server

    def checked() -> int:
        require_places(chosen.at_once)
        require_pipeline()
        return act(chosen.targets, chosen.at_once)

    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to ignore
    return exit_code(checked)


def _reproduce(targets: Sequence[str], at_once: int | None) -> int:
    workspace = Path.cwd()
    with exclusive(workspace / FLOW_LOCK, "reproduce"):
        steps = plan(targets)
    if not any(step.is_changed for step in steps):
        record_pending_lineage(workspace)
        return _end(verdict_unchanged(steps))
    prepare_environment(workspace)
    report_to_server(workspace)
    # Started here: they import while Prefect starts.
    with preloaded(workspace, environment_of_stages(), due_modules(steps)):
        # Imported here: Prefect reads its settings on import, which takes a second.
        from flows.pipeline import reproduce

        verdict = reproduce(targets=list(targets), at_once=at_once)
    return _end(verdict)


def _reproduce_without_server(targets: Sequence[str], at_once: int | None) -> int:
    return _end(reproduce_without_server(targets, at_once))


def _reproduce_remotely(targets: Sequence[str], at_once: int | None) -> int:
    workspace = Path.cwd()
    with exclusive(workspace / FLOW_LOCK, "reproduce"):
        lock = RemoteLock(workspace, targets)
    if any(step.is_changed for step in lock.steps):
        require_server(workspace)
        prepare_environment(workspace)
        report_to_server(workspace)
        from flows.dispatch import reproduce_remotely  # imported here as above

        reproduce_remotely(targets=list(targets), at_once=at_once)
    names = [step.name for step in lock.steps]
    last = " ".join(names[-1:])
    print(f"{len(names)} stages are up to date; dvc pull {last} brings what the last one wrote")
    for name in lock.left:
        print(f"{name} has no outs, so no worker ran it: dvc pull, then dvc repro {name}")
    return 0


def _end(verdict: str) -> int:
    """Prints what was done, and where the report is; returns the exit code."""
    where = f"; report: {REPORT}" if REPORT.exists() else ""
    print(f"{verdict}{where}")
    return 0


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
