"""Stages in clones of their own, their data in S3: the same dvc.lock, and no data where it is."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from dvc.repo import Repo
from dvc.utils.serialize import dumps_yaml

from flows.dispatch import RemoteRunner
from flows.planning import Step
from flows.remote_lock import RemoteLock
from flows.runner import LOGS, Outcome, StageError
from flows.server import free_port
from flows.wire import Answer, Order
from flows.worker import PLACE, StageRun, repository_of
from grpo.errors import ArtifactError, GrpoError, ParameterError
from grpo.runtime.artifacts.files import write_json
from tests import tiny_pipeline
from tests.files import contents
from tests.storage import conftest as storage

# DVC itself uses what pygtrie deprecates; its S3 plugin leaves sockets to the garbage collector.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
server_port = storage.server_port
LISTING = ".dir"


class Farm:
    """A repository, a store, and two hosts that run its stages in turn."""

    def __init__(self, root: Path, repository: Path) -> None:
        self.root, self.repository = root, repository
        self.started: list[str] = []

    def send(self, order: Order) -> Answer:
        self.started.append(order.stage)
        home = self.root / f"host-{len(self.started) % 2}"
        run = StageRun(
            order, workspace=home, home=home, repository=str(self.repository), show=print
        )
        return run.carry_out()

    @contextlib.contextmanager
    def sent(self, step: Step, order: Order, stopped: threading.Event) -> Iterator[Answer]:
        yield self.send(order)

    def run(self, *names: str) -> dict[str, Outcome]:
        """Runs stages of the working directory's commit; returns what became of them."""
        lock = RemoteLock(Path.cwd())
        runner = RemoteRunner(lock, self.sent, at_once=1, show=print)
        chosen = [step for step in lock.steps if step.name in names or not names]
        return {step.name: runner.run_stage(step).outcome for step in chosen}


def publish(workspace: Path) -> None:
    """Commits what has changed, and pushes it."""
    tiny_pipeline.commit(workspace, "a change")
    tiny_pipeline.run(workspace, "git", "push", "-q", "--force", "origin", "HEAD:refs/heads/next")


def stale(workspace: Path) -> set[str]:
    return {step.name for step in RemoteLock(workspace).steps if step.is_changed}


@pytest.fixture(scope="module")
def repository(
    pristine: Path, server_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The tiny pipeline with a remote in S3."""
    address = f"http://127.0.0.1:{server_port}"
    root = tiny_pipeline.copy(pristine, tmp_path_factory.mktemp("origin") / "pipeline")
    config = root / ".dvc" / "config"
    config.write_text(
        f"{config.read_text()}    remote = store\n"
        f"['remote \"store\"']\n    url = s3://store/dvc\n    endpointurl = {address}\n"
    )
    tiny_pipeline.commit(root, "a remote")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**storage.SECRETS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        patch.setenv("PATH", tiny_pipeline.environment()["PATH"])
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="store")
        client.close()
        yield root


@pytest.fixture(scope="module")
def farm(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """After all stages have run, on one host where an earlier run was killed."""
    root = tmp_path_factory.mktemp("farm")
    left = root / "host-1" / "0"
    for name in ("artifacts/prompts/train.txt", ".git/index.lock", ".work/prepare/checkpoint"):
        (left / name).parent.mkdir(parents=True)
        (left / name).write_text("half")
    (left / PLACE).touch()
    farm = Farm(root, repository)
    tiny_pipeline.run(root, "git", "clone", "-q", str(repository), "done")
    with contextlib.chdir(root / "done"):
        farm.run()
    return farm


@pytest.fixture
def clone(farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the test: where nothing but dvc.lock came to."""
    farm.started.clear()
    root = tiny_pipeline.copy(farm.root / "done", tmp_path / "clone")
    tiny_pipeline.run(root, "git", "config", "user.email", "tests@example.invalid")
    tiny_pipeline.run(root, "git", "config", "user.name", "tests")
    monkeypatch.chdir(root)
    return root


def test_stages_on_two_hosts_leave_the_lock_of_a_local_run(clone: Path, reproduced: Path) -> None:
    assert (clone / "dvc.lock").read_bytes() == (reproduced / "dvc.lock").read_bytes()


def test_no_data_comes_here_until_it_is_pulled(clone: Path, reproduced: Path) -> None:
    assert not (clone / "artifacts").exists()
    cached = contents(clone / ".dvc" / "cache")
    assert all(name.endswith(LISTING) for name in cached)
    with Repo(str(clone)) as repo:
        repo.pull()
    assert contents(clone / "artifacts") == contents(reproduced / "artifacts")


def test_a_host_keeps_checkpoints_and_no_data_of_what_it_ran(farm: Farm) -> None:
    place = farm.root / "host-1" / "0"
    assert [each.name for each in place.iterdir()] == [".work"]
    assert (place / ".work" / "prepare" / "checkpoint").read_text() == "half"
    assert "working on report" in (place / LOGS / "report.log").read_text()


def test_a_second_run_starts_nothing(clone: Path, farm: Farm) -> None:
    assert set(farm.run().values()) == {Outcome.UNCHANGED}
    assert farm.started == []


def test_a_changed_parameter_makes_stale_only_what_depends_on_it(clone: Path) -> None:
    tiny_pipeline.replace(clone, "rate: 0.2", "rate: 0.3")
    tiny_pipeline.commit(clone, "another rate")
    assert stale(clone) == {"train@b-1", "report"}
    lock = RemoteLock(clone)
    entry = dumps_yaml({"train@b-1": lock.content["stages"]["train@b-1"]})
    (written,) = lock.content["stages"]["train@b-1"]["outs"]
    other = lock.digests["artifacts/policies/a-1"]
    lock.merge("train@b-1", entry.replace("rate: 0.2", "rate: 0.3").replace(written["md5"], other))
    # Killed here, the next orchestrator still knows what has to follow.
    assert stale(clone) == {"evaluate@b-1", "report"}


def test_what_writes_the_same_bytes_makes_nothing_else_run(clone: Path, farm: Farm) -> None:
    tiny_pipeline.replace(clone, "seed: 1", "seed: 2")
    publish(clone)
    assert stale(clone) == {"prepare"}
    outcomes = farm.run()
    assert farm.started == ["prepare"]
    assert {name for name, each in outcomes.items() if each is not Outcome.UNCHANGED} == {"prepare"}
    assert stale(clone) == set()


def test_a_stage_may_read_part_of_an_out_and_outs_among_files(clone: Path, farm: Farm) -> None:
    """What it reads has the hash that DVC finds where all of it lies, or it would be refused."""
    (clone / "data" / "large").mkdir()
    (clone / "data" / "large" / "numbers.txt").write_text("1 2 3")
    with Repo(str(clone)) as repo:
        repo.add(str(clone / "data" / "large"))
        repo.push([str(clone / "data" / "large")])
    shutil.rmtree(clone / "data" / "large")
    read = "artifacts/policies/base/model.txt, data, artifacts"
    pipeline = clone / "dvc.yaml"
    text = pipeline.read_text().replace(
        "deps: [artifacts/evaluations, ", f"deps: [{read}/prompts, "
    )
    pipeline.write_text(text)
    publish(clone)
    assert stale(clone) == {"report"}
    assert farm.run("report") == {"report": Outcome.COMPLETED}
    assert stale(clone) == set()
    (clone / "data" / "prompts.txt").write_text("2+2=\n")
    publish(clone)
    assert stale(clone) == {"prepare", "report"}


def test_a_host_brings_the_data_that_a_manifest_names_and_no_other(clone: Path, farm: Farm) -> None:
    for name in ("large", "other"):
        (clone / "data" / name).mkdir()
        (clone / "data" / name / "numbers.txt").write_text(name)
    with Repo(str(clone)) as repo:
        repo.add([str(clone / "data" / "large"), str(clone / "data" / "other")])
        repo.push()
    write_json(clone / "named.json", {"data/large/numbers.txt": ""})
    (clone / "dvc.yaml").write_text(
        """\
stages:
  check:
    cmd: mkdir -p artifacts/data && cp named.json artifacts/data/base.json
    deps: [data, named.json]
    outs: [artifacts/data/base.json]
  base:
    cmd: test ! -e data/other && cp data/large/numbers.txt artifacts/base.txt
    deps: [artifacts/data/base.json]
    outs: [artifacts/base.txt]
"""
    )
    publish(clone)
    ended = farm.run()
    assert farm.started == ["check", "base"]
    assert [ended[name] for name in farm.started] == [Outcome.COMPLETED] * 2
    shutil.rmtree(clone / "data" / "large")
    with Repo(str(clone)) as repo:
        repo.pull(str(clone / "artifacts" / "base.txt"))
    assert (clone / "artifacts" / "base.txt").read_text() == "large"


REFUSED = {
    "dep artifacts/policies/base must be a1": ("md5: a1", "md5: a2"),
    "dep artifacts/prompts/train.txt must be a3": ("md5: a3", "md5: a4"),
    "dep work.py must be": ("path: work.py", "path: other.py"),
    "param params.yaml:rounds.a-1 must be": ("rate: 0.1", "rate: 0.2"),
    "param params.yaml:seconds must be 0.0, got None": ("seconds: 0.0", "sleep: 0.0"),
    "cmd must be python work.py": ("cmd: python", "cmd: true; python"),
    "outs must be": ("path: artifacts/policies/a-1", "path: dvc.yaml"),
    "outs must have an md5": ("md5: 4b", "md5: ../4b"),
    "extra keys not allowed": ("  params:", "  more: {}\n  params:"),
    "must be an entry of dvc.lock, 'train@a-1'": ("train@a-1:", "train@b-1:"),
    "structure is corrupted": ("cmd: ", "cmd: ["),
}


def test_an_entry_of_another_commit_or_other_data_is_refused(clone: Path) -> None:
    lock = RemoteLock(clone)
    before = (clone / "dvc.lock").read_bytes()
    entry = dumps_yaml({"train@a-1": lock.content["stages"]["train@a-1"]})
    for said, (old, new) in REFUSED.items():
        assert old in entry
        with pytest.raises(StageError, match="the worker's entry is refused, ") as error:
            lock.merge("train@a-1", entry.replace(old, new, 1))
        assert said in str(error.value)
        assert (clone / "dvc.lock").read_bytes() == before
    lock.merge("train@a-1", entry)
    assert (clone / "dvc.lock").read_bytes() == before


def test_files_that_workers_cannot_see_are_refused(clone: Path) -> None:
    (clone / ".dvc.lock.1.grpo-tmp").write_text("")  # of a writer that was killed
    RemoteLock(clone)  # dvc.lock is written here, and in no commit
    (clone / "data" / "more.txt").write_text("2+2=\n")
    with pytest.raises(ParameterError, match=r"^data/more\.txt: must be as in the commit"):
        RemoteLock(clone)
    (clone / "data" / "more.txt").unlink()
    tiny_pipeline.replace(clone, "seed: 1", "seed: 2")
    with pytest.raises(ParameterError, match=r"^params\.yaml: must be as in the commit"):
        RemoteLock(clone)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (".dvc/config", "remote = store", "", r"^\.dvc/config: must name a remote"),
        ("dvc.yaml", "policies/base]", "policies/base: {push: false}]", "base: out artifacts/pol"),
        ("dvc.yaml", "  base:\n", "  base:\n    wdir: data\n", "base: must be in the repository's"),
        ("dvc.yaml", "deps: [data/", "deps: [no/", "prepare: no/prompts.txt must exist"),
        ("dvc.yaml", "params: [seed]", "params: [seeds]", "'seeds' are missing from 'params.yaml'"),
        ("dvc.lock", "schema: '2.0'", "[", r"dvc\.lock: must be a lock file of DVC"),
    ],
)
def test_a_pipeline_that_workers_cannot_run_is_one_line(
    clone: Path, file: str, old: str, new: str, said: str
) -> None:
    path = clone / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    tiny_pipeline.commit(clone, "a change")
    with pytest.raises(ParameterError, match=said):
        RemoteLock(clone)


def test_a_remote_out_of_reach_is_one_line(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    shutil.rmtree(clone / ".dvc" / "cache")
    nowhere = f"['remote \"store\"']\n    endpointurl = http://127.0.0.1:{free_port()}\n"
    (clone / ".dvc" / "config.local").write_text(nowhere)
    with pytest.raises(ArtifactError, match=r"^DVC's remote .*Could not connect to the endpoint"):
        RemoteLock(clone)


def test_an_order_is_no_path_no_option_and_not_too_large() -> None:
    commit, outs = "0" * 40, [{"path": "a", "md5": "0" * 32}]
    Order(commit=commit, stage="a", entries={"b": {"outs": outs}})
    with pytest.raises(ParameterError, match="a: commit must be a hash of git"):
        Order(commit="--upload-pack=id", stage="a", entries={})
    with pytest.raises(ParameterError, match="a: entries must have md5s of DVC"):
        Order(commit=commit, stage="a", entries={"b": {"outs": [{"path": "a", "md5": "../a"}]}})
    with pytest.raises(ParameterError, match=r"a: reads from 1 stages, .*dvc repro -s a$"):
        Order(commit=commit, stage="a", entries={"b": {"outs": outs * 10_000}})


def test_a_host_refuses_what_it_cannot_run(
    clone: Path, farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(stage: str = "prepare", commit: str = RemoteLock(clone).commit) -> str:
        order = Order(commit=commit, stage=stage, entries={})
        with pytest.raises(GrpoError) as error:
            farm.send(order)
        return str(error.value)

    assert f"has no commit {'0' * 40}; git push it there" in refusal(commit="0" * 40)
    assert refusal("no-stage") == "dvc.yaml: has no stage no-stage"
    assert "run dvc push where the data was made" in refusal("base")
    (clone / "requirements.lock").write_text("torch==0\n")
    publish(clone)
    assert "requirements.lock: must be that of the" in refusal(commit=RemoteLock(clone).commit)
    monkeypatch.setenv("GRPO_REPOSITORY", "https://me:secret@example.invalid/grpo.git")
    with pytest.raises(
        ParameterError, match="must hold no password, got https://\\*\\*\\*@example"
    ):
        repository_of(clone)
    monkeypatch.delenv("GRPO_REPOSITORY")
    assert repository_of(clone) == str(farm.repository)
