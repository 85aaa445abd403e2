"""Where a run comes from: commit, date, machine, seed, and addresses of its other pages."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo.lineage.lock import LOCK, read_lock
from grpo.lineage.revision import NO_COMMIT, revisions
from grpo.params.parameters import Parameters
from grpo.report.seconds import stages_of
from grpo.runtime.artifacts.files import ADDRESSES, read_json
from grpo.runtime.artifacts.usage import USAGE


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Facts about a run by title, and addresses of other pages by title."""

    facts: dict[str, str]
    links: dict[str, str]


def read_origin(params: Parameters, workspace: Path = Path()) -> Origin:
    """Returns what the workspace knows; a fact that it does not know is left out."""
    machine = params.machine
    threads = f", {machine.threads} threads" if machine.threads != 1 else ", 1 thread"
    return Origin(
        facts={
            **_commit(params, workspace),
            **_date(params, workspace),
            "machine": f"{machine.device}, {machine.dtype}{threads}",
            "seed": str(params.seed),
        },
        links=dict(_links(workspace)),
    )


def _commit(params: Parameters, workspace: Path) -> dict[str, str]:
    """Returns the commit of the newest entry of dvc.lock that the page shows."""
    if not (workspace / LOCK).exists():
        return {}
    lock = read_lock(workspace)
    shown = [name for name in stages_of(params) if name in lock]
    if not shown:
        return {}
    found = revisions(workspace, {shown[-1]: lock[shown[-1]]})[shown[-1]]
    return {} if found.commit == NO_COMMIT else {"commit": str(found)}


def _date(params: Parameters, workspace: Path) -> dict[str, str]:
    """Returns when the last stage that was measured here ended."""
    paths = [workspace / USAGE / f"{stage}.json" for stage in stages_of(params)]
    ended = [path.stat().st_mtime for path in paths if path.exists()]
    if not ended:
        return {}
    return {"date": datetime.fromtimestamp(max(ended), UTC).strftime("%Y-%m-%d %H:%M UTC")}


def _links(workspace: Path) -> Iterator[tuple[str, str]]:
    """Yields the addresses of the pages of Prefect and MLflow that last ran in the workspace.

    A team's MLflow comes from MLFLOW_TRACKING_URI. Not from PREFECT_API_URL, which during a run may
    be the address of a server that ends with it. An address with a password is left out.
    """
    path = workspace / ADDRESSES
    text = path.read_text() if path.exists() else ""
    found = read_json(path) if text else {}
    tracking = os.environ.get("MLFLOW_TRACKING_URI", "")
    shown = {"Prefect": found.get("prefect", ""), "MLflow": found.get("mlflow") or tracking}
    for title, address in shown.items():
        if str(address).startswith("http") and "@" not in address:
            yield title, str(address)
