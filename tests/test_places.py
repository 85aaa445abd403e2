"""Missing, unreadable or wrong paths end every command with one line and exit code 2."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.exits import exit_code
from flows.planning import require_pipeline
from grpo.errors import ArtifactError, ParameterError
from grpo.registry.weights import load_version
from grpo.runtime.artifacts.files import refused_by_the_system
from grpo.runtime.artifacts.marks import read_marks
from grpo.runtime.artifacts.media import read_rows
from tests.files import bound_by_modes

ROOT = Path(__file__).parents[1]
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_grpo(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> "subprocess.CompletedProcess[str]":
    """Runs a command of `python -m grpo` in this process: its imports take seconds."""
    from grpo.__main__ import main

    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setattr(sys, "argv", ["grpo", *words])
    said: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", said.append)
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, stderr="".join(said))


def refused(done: "subprocess.CompletedProcess[str]", name: str) -> None:
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert name in done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with parameters, the pipeline, and paths that are not files."""
    for name, source in {"params.yaml": "recipes/smoke.yaml", "dvc.yaml": "dvc.yaml"}.items():
        (tmp_path / name).write_bytes((ROOT / source).read_bytes())
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(tmp_path)  # a socket's path is short
        server.bind("socket")
        os.chdir(here)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("thing", ["pipe", "socket"])
@pytest.mark.parametrize(
    "words",
    [
        ["check", "THING"],
        ["advise", "THING"],
        ["lineage", "THING"],
        ["lineage", "dvc.yaml", "--svg", "THING"],
        ["load", "models:/a/1", "THING"],
        ["sample", "THING", "1+1="],
        ["sample", "folder", "1+1=", "--images", "THING"],
        ["export", "THING", "out"],
        ["export", "folder", "THING"],
        ["upload", "THING", "s3://bucket/place"],
    ],
    ids=lambda words: "-".join(words[:1] + words[2:]),
)
def test_a_pipe_or_a_socket_is_never_read(
    place: Path, words: list[str], thing: str, monkeypatch: pytest.MonkeyPatch
):
    given = [thing if each == "THING" else each for each in words]
    done = run_grpo(place, monkeypatch, *given)
    assert done.returncode == 2
    assert f"{thing}: must be a file or a directory" in done.stderr


def close(place: Path, name: str) -> Path:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True) if name == ".work/marks" else path.write_bytes(b"")
    path.chmod(0)
    return path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("mlflow.db", lambda path: load_version("models:/solver@champion", Path("served"))),
        ("model.safetensors", lambda path: read_rows(path, "weight", [0])),
        (".work/marks", lambda path: read_marks()),
    ],
)
def test_what_is_closed_is_called_closed(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], object]
):
    """The error neither says missing nor broken, and comes at once."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = close(place, name)
    with (
        bound_by_modes(),
        pytest.raises(ArtifactError, match=f"{name}: Permission denied; permit reading"),
        refused_by_the_system(),
    ):
        read(path)
    path.chmod(0o700)


@pytest.mark.parametrize("thing", ["pipe", "folder"])
def test_parameters_must_be_a_file(place: Path, thing: str, monkeypatch: pytest.MonkeyPatch):
    (place / "params.yaml").unlink()
    (place / thing).rename(place / "params.yaml")
    refused(run_grpo(place, monkeypatch, "check"), "params.yaml: must be a ")


def test_a_stage_reads_no_pipe_and_writes_into_no_file(place: Path):
    words = STAGES["prepare"]["cmd"].split()[2:]
    refused(run(place, *["pipe" if each == "data" else each for each in words]), "pipe: must")
    (place / "artifacts").write_text("a file")
    refused(run(place, *words), "artifacts")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["flows.reproduce"], "must be the directory of dvc.yaml"),
        *(
            pytest.param(words, "must be the directory of dvc.yaml", marks=pytest.mark.long)
            for words in (
                ["flows.sweep", "--set", "seed=1"],
                ["flows.promote", "solver", "a-1"],
                ["flows.ui"],
                ["flows.team"],
            )
        ),
        pytest.param(
            ["grpo", "load", "models:/solver@champion", "served"],
            "mlflow.db does not exist",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_start_from_a_subdirectory_is_one_line(place: Path, words: list[str], reason: str):
    refused(run(place / "folder", *words), reason)
    assert not list((place / "folder").iterdir())


def test_a_check_from_a_subdirectory_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch):
    refused(run_grpo(place / "folder", monkeypatch, "check"), "params.yaml: no such file")
    assert not list((place / "folder").iterdir())


def test_a_pipeline_without_git_or_dvc_says_what_to_run(place: Path):
    for prepare in (["true"], ["mkdir", ".dvc"]):
        subprocess.run(prepare, cwd=place, check=True)
        refused(run(place, "flows.reproduce"), "; run git init and dvc init")


def test_a_pipeline_without_parameters_says_what_to_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    (place / "params.yaml").unlink()
    monkeypatch.chdir(place)
    with pytest.raises(ParameterError, match=r"^params\.yaml: no such file; run python -m grpo"):
        require_pipeline()


def test_a_directory_that_is_gone_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place / "folder")
    (place / "folder").rmdir()
    assert exit_code(lambda: 0) == 2
    assert capsys.readouterr().err.startswith("the working directory is gone; change to")


def test_a_unicode_path_is_printed_under_any_locale(place: Path):
    """A page with other characters is read, too."""
    home = place / "Größe \N{SNOWMAN}"
    (home / "artifacts/report").mkdir(parents=True)
    (home / "artifacts/report/index.html").write_text("\N{SNOWMAN}", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from grpo import __main__ as commands; "
        "from grpo.runtime.artifacts.marks import ARTIFACTS, PAGE, changed_inputs; "
        "assert changed_inputs(PAGE, ARTIFACTS) == []; sys.argv = ['grpo', 'check']; "
        "commands._check = lambda arguments: print('\\N{SNOWMAN}', Path.cwd()); commands.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0", "LC_ALL": "POSIX"}
        | {"PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2603" in done.stdout


@pytest.mark.long
def test_a_sweep_without_a_commit_is_one_line(place: Path):
    """Also if git is not installed."""
    for prepare in (["true"], ["git", "init", "-q"]):
        subprocess.run(prepare, cwd=place, check=True)
        refused(run(place, "flows.sweep", "--set", "seed=1"), "a git repository with a commit")


STAGE = """\
import time
from stages.entry import run

def main(usage):
    print("runs", flush=True)
    time.sleep(60)

run(main, stage="any")
"""
IMPORTING = """\
import sys, time
sys.argv[0] = "-m"
import {package}
print("starts", flush=True)
time.sleep(60)
"""
PARSING = """\
import argparse, runpy, time
argparse.ArgumentParser = lambda **settings: (print("starts", flush=True), time.sleep(60))
runpy.run_module("grpo", run_name="__main__", alter_sys=True)
"""
COMMAND = """\
import sys, time
import grpo.__main__ as commands
sys.argv = ["grpo", "check"]
commands._check = lambda arguments: (print("runs", flush=True), time.sleep(60))
commands.main()
"""
FLOW = """\
import sys, time
from flows.exits import exit_code
sys.exit(exit_code(lambda: (print("runs", flush=True), time.sleep(60))))
"""


@pytest.mark.parametrize(
    "code",
    [
        *(STAGE, COMMAND, FLOW),
        pytest.param(PARSING, marks=pytest.mark.long),
        IMPORTING.format(package="stages"),
        pytest.param(IMPORTING.format(package="flows"), marks=pytest.mark.long),
    ],
    ids=["stage", "grpo", "flow", "grpo starts", "stage starts", "flow starts"],
)
def test_ctrl_c_is_one_line_and_the_exit_code_of_a_shell(tmp_path: Path, code: str):
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.count("\n")) == (130, 1), said
    assert said.startswith("stopped")


@pytest.mark.parametrize("name", ["artifacts", "served", "mlartifacts", ".work", ".runs", ".s3"])
def test_git_ignores_what_commands_write_and_links_to_it(tmp_path: Path, name: str):
    """Weights may lie on another disk, behind a symbolic link."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    (tmp_path / name).symlink_to("/tmp")
    done = subprocess.run(["git", "check-ignore", "-q", name], cwd=tmp_path)
    assert done.returncode == 0
