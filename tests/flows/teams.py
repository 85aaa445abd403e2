"""`python -m flows.team` as a process, and what a member of the team sees and asks over HTTP."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

from flows.server import free_port
from tests import tiny_pipeline

MODEL = "solver"
RUN_SECONDS = 300.0  # on a busy machine
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Team:
    """What a member sees of `python -m flows.team`."""

    def __init__(
        self, workspace: Path, process: "subprocess.Popen[str]", ports: Mapping[str, str]
    ) -> None:
        self.workspace, self.process = workspace, process
        addresses = [f"http://127.0.0.1:{each}" for each in ports.values()]
        self.prefect, self.mlflow, self.s3 = addresses
        self.api = f"{self.prefect}/api"
        self.lost_run = ""  # of the team before, with which it was killed
        found = self.ask("deployments/filter", {})
        flows = {each["id"]: each["name"] for each in self.ask("flows/filter", {})}
        self.deployments = {f"{flows[each['flow_id']]}/{each['name']}": each for each in found}

    def ask(self, path: str, content: Any) -> Any:
        """Returns what Prefect's server answers."""
        request = urllib.request.Request(
            f"{self.api}/{path}",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        for _ in range(10):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                # Its database was busy for too long; its own client asks again, too.
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                error.close()
        raise AssertionError(f"{self.api}: is busy")

    def run(self, deployment: str, seconds: float = 0.0, **parameters: Any) -> dict[str, Any]:
        """Schedules a run and returns it when it has ended."""
        return self.ended(self.start(deployment, seconds, **parameters))

    def ended(self, run: str) -> dict[str, Any]:
        """Returns a run when it has ended."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            (found,) = self.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
            if found["state_type"] in ENDED:
                return dict(found)
            time.sleep(0.1)
        raise AssertionError(f"the run has not ended: {found['state']}")

    def start(self, deployment: str, seconds: float = 0.0, **parameters: Any) -> str:
        """Schedules a run and returns its id."""
        due = datetime.now(UTC) + timedelta(seconds=seconds)
        made = self.ask(
            f"deployments/{self.deployments[deployment]['id']}/create_flow_run",
            {
                "parameters": parameters,
                "state": {
                    "type": "SCHEDULED",
                    "state_details": {"scheduled_time": due.isoformat()},
                },
            },
        )
        return str(made["id"])

    def decide(self, deployment: str, **parameters: Any) -> dict[str, Any]:
        """Returns what a run of a deployment decides, and as which state Prefect shows it."""
        run = self.run(deployment, model=MODEL, **parameters)
        (row,) = json.loads(self.artifact("promotion", run["id"]))
        return {**row, "state": f"{run['state_type']} {run['state_name']}"}

    def aliases(self) -> dict[str, str]:
        """Returns the model's versions by alias, as MLflow's server says."""
        address = f"{self.mlflow}/api/2.0/mlflow/registered-models/get?name={MODEL}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            found = json.load(answer)["registered_model"].get("aliases", [])
        return {each["alias"]: each["version"] for each in found}

    def starts_of(self, deployment: str) -> set[str]:
        """Returns the times of day at which it will run, once the server has planned them."""
        own = {"id": {"any_": [self.deployments[deployment]["id"]]}}
        for _ in range(300):
            planned = self.ask("flow_runs/filter", {"deployments": own})
            if planned:
                return {each["expected_start_time"][11:16] for each in planned}
            time.sleep(0.1)
        raise AssertionError(f"{deployment} is never run")

    def artifact(self, key: str, run: str) -> Any:
        """Returns the data of a run's artifact."""
        asked = {"key": {"any_": [key]}, "flow_run_id": {"any_": [run]}}
        (found,) = self.ask("artifacts/filter", {"artifacts": asked})
        return found["data"]


@contextmanager
def running_team(workspace: Path, **settings: str) -> Iterator[Team]:
    """Starts `python -m flows.team` in a workspace and kills what is left of it at the end."""
    ports = {f"GRPO_{each}_PORT": str(free_port()) for each in ("PREFECT", "MLFLOW", "S3")}
    environment = tiny_pipeline.environment()
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME"):
        environment.pop(name, None)
    environment.update(ports, **settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.team"],
        cwd=workspace,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        assert any(line.startswith("Ctrl-C") for line in process.stdout)
        yield Team(workspace, process, ports)
    finally:
        process.kill()
        process.communicate()


def processes_in(workspace: Path) -> list[str]:
    """Returns the commands that run in a workspace."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            try:
                if Path(os.readlink(each / "cwd")).is_relative_to(workspace):
                    found.append((each / "cmdline").read_text())
            except OSError:
                continue
    return found
