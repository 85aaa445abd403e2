"""The pipeline on two hosts that share no directory: stages here and there, their data in S3."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from dvc.repo import Repo

from flows.dispatch import RemoteRunner
from flows.planning import Step
from flows.remote_lock import RemoteLock
from flows.runner import Outcome
from flows.wire import Answer, Order
from flows.worker import StageRun
from grpo.params.yaml import dump_yaml
from tests import tiny_pipeline
from tests.files import contents
from tests.pipeline.conftest import reproduce
from tests.pipeline.test_hosts import SECONDS, said, torchrun
from tests.pipeline.workspaces import check_out, dvc, environment, locked_stages, two_arms
from tests.storage import conftest as storage

# DVC itself uses what pygtrie deprecates; its S3 plugin leaves sockets to the garbage collector.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
server_port = storage.server_port
TRAINS = ("base", "profile", "train")  # stages of the host that trains
NO_OUTS = "lineage"  # no worker runs it
IDENTITY = ("-c", "user.name=tests", "-c", "user.email=tests@example.invalid")
# Stages whose outputs train@uniform-1 reads.
READ = ("check", "prepare", "base", "curriculum@uniform", "rollout@uniform-1", "score@uniform-1")


def one_arm() -> dict[str, Any]:
    """Returns the parameters of a round of three iterations in two ranks."""
    params = two_arms()
    arm = params["arms"]["uniform"]
    arm["training"] |= {"iterations_per_round": 3, "updates_per_iteration": 1, "ranks": 2}
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 12}},
        {"fix_group_size": {"rollouts": 4}},
    ]
    rounds = {"uniform-1": {"arm": "uniform", "start": "base", "phase": 1}}
    return {**params, "arms": {"uniform": arm}, "rounds": rounds}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, server_port: int) -> Iterator[Path]:
    """The repository, whose remote is in S3."""
    address = f"http://127.0.0.1:{server_port}"
    root = check_out(tmp_path_factory.mktemp("hosts") / "origin")
    (root / "params.yaml").write_text(dump_yaml(one_arm()))
    config = root / ".dvc" / "config"
    config.write_text(
        f"{config.read_text()}    remote = store\n"
        f"['remote \"store\"']\n    url = s3://hosts/dvc\n    endpointurl = {address}\n"
    )
    commit(root, "a round of an arm, and a remote")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**storage.SECRETS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        patch.setenv("PATH", environment()["PATH"])
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="hosts")
        client.close()
        yield root


def commit(root: Path, message: str) -> None:
    tiny_pipeline.run(root, "git", "add", "-A")
    tiny_pipeline.run(root, "git", *IDENTITY, "commit", "-q", "-m", message)


class Hosts:
    """Two hosts that run the stages of an orchestrator: one has the base and trains."""

    def __init__(self, origin: Path) -> None:
        self.origin, self.root = origin, origin.parent
        self.ran: dict[str, list[str]] = {"trains": [], "samples": []}
        self.orchestrator = self.root / "orchestrator"

    @contextlib.contextmanager
    def send(self, step: Step, order: Order, stopped: threading.Event) -> Iterator[Answer]:
        host = "trains" if order.stage.partition("@")[0] in TRAINS else "samples"
        self.ran[host].append(order.stage)
        home = self.root / host
        yield StageRun(
            order, workspace=home, home=home, repository=str(self.origin), show=print
        ).carry_out()

    def run(self) -> None:
        """Runs all stages with outputs."""
        tiny_pipeline.run(self.root, "git", "clone", "-q", str(self.origin), "orchestrator")
        with contextlib.chdir(self.orchestrator):
            lock = RemoteLock(self.orchestrator)
            runner = RemoteRunner(lock, self.send, at_once=1, show=print)
            for step in lock.steps:
                if step.name != NO_OUTS:
                    assert runner.run_stage(step).outcome == Outcome.COMPLETED


@pytest.fixture(scope="module")
def hosts(origin: Path) -> Hosts:
    """The hosts after all stages have run on them."""
    made = Hosts(origin)
    made.run()
    return made


def test_stages_divided_over_two_hosts_end_with_the_bytes_of_one(hosts: Hosts):
    """One host has the base and trains; the other one samples, judges and evaluates."""
    assert {*hosts.ran["trains"]} == {"base", "profile", "train@uniform-1"}
    assert {"rollout@uniform-1", "score@uniform-1", "evaluate@uniform-1"} <= {*hosts.ran["samples"]}
    for host in hosts.ran:  # it keeps no data but its cache
        assert [each.name for each in (hosts.root / host / "0").iterdir()] == [".work"]
    assert not (hosts.orchestrator / "artifacts").exists()

    single = reproduce(Path(shutil.copytree(hosts.origin, hosts.root / "single", symlinks=True)))
    expected = {name: each for name, each in locked_stages(single).items() if name != NO_OUTS}
    assert locked_stages(hosts.orchestrator) == expected
    reader = Path(shutil.copytree(hosts.orchestrator, hosts.root / "reader", symlinks=True))
    with contextlib.chdir(reader), Repo() as repo:
        repo.pull()
    found, of_single = contents(reader / "artifacts"), contents(single / "artifacts")
    assert any(name.startswith("policies/uniform-1/") for name in found)
    assert found == {name: of_single[name] for name in found}


def test_a_round_trained_by_ranks_on_two_hosts_is_that_of_one(hosts: Hosts):
    """They pull what it reads from S3; the first one commits and pushes what it writes."""
    commit(hosts.orchestrator, "the lock")
    command = str(locked_stages(hosts.orchestrator)["train@uniform-1"]["cmd"])
    entry = locked_stages(hosts.orchestrator)["train@uniform-1"]
    clones = [hosts.root / f"clone-{n}" for n in range(2)]
    for clone in clones:
        tiny_pipeline.run(hosts.root, "git", "clone", "-q", str(hosts.orchestrator), clone.name)
        dvc(clone, "pull", "-q", *READ)
        assert not (clone / "artifacts/policies/uniform-1").exists()
    with torchrun(clones, command, stage="train@uniform-1") as processes:
        codes = [each.wait(SECONDS) for each in processes]
    assert codes == [0, 0], said(clones)
    assert not (clones[1] / "artifacts/policies/uniform-1").exists()
    dvc(clones[0], "commit", "-q", "--force", "train@uniform-1")
    assert locked_stages(clones[0])["train@uniform-1"] == entry
