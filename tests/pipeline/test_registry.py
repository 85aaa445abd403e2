"""A real policy from the registry: registered, loaded by hash and sampled from."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.server import free_port, mlflow_server
from grpo.__main__ import main
from grpo.lineage.record import tracking_uri
from grpo.registry.gate import Bounds
from grpo.registry.store import REFUSED, Registry
from grpo.registry.weights import load_version
from tests import tiny_pipeline
from tests.modalities.exposure import LOOPBACK, commands, listening
from tests.pipeline.workspaces import copy_for_dvc

Say = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ROUND = "sgpo-1"
STRICT = Bounds(margin=0.9)  # so that it is refused whatever it has learned


@pytest.fixture(scope="module")
def registered(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run whose round is a challenger."""
    root = copy_for_dvc(finished, tmp_path_factory.mktemp("registered") / "workspace")
    tiny_pipeline.run(root, "git", "config", "user.email", "tests@example.invalid")
    tiny_pipeline.run(root, "git", "config", "user.name", "tests")
    tiny_pipeline.commit(root, "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        decision = Registry("solver").promote(ROUND, STRICT)
    assert (decision.outcome, decision.version) == (REFUSED, "1"), decision.reason
    assert "not beyond 0.9" in decision.reason
    return root


@pytest.fixture
def inside(registered: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace as the working directory."""
    monkeypatch.chdir(registered)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return registered


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `python -m grpo WORDS` and returns its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["grpo", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_a_registered_policy_is_loaded_whole_and_drawn_from(inside: Path, tmp_path: Path, say: Say):
    loaded = tmp_path / "loaded"
    code, out, _ = say("load", "models:/solver@challenger", str(loaded))
    assert (code, out) == (0, f"{loaded}: version 1\n")
    for part, name in {"policy": ROUND, "base": "base"}.items():
        source = inside / "artifacts/policies" / name
        files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
        assert files
        assert all(
            (source / each).read_bytes() == (loaded / part / each).read_bytes() for each in files
        )
    draw = ("sample", str(loaded), "Sum of 1, 2 =", "3+4=", "--rollouts", "2", "--seed", "7")
    first = say(*draw)
    assert first[0] == 0, first[2]
    assert [line.split("\t")[0] for line in first[1].splitlines()] == [draw[2]] * 2 + [draw[3]] * 2
    assert say(*draw)[1] == first[1]
    assert say(*draw[:-1], "8")[1] != first[1]


def test_a_rounds_policy_is_drawn_from_as_its_version_is(inside: Path, tmp_path: Path, say: Say):
    load_version("models:/solver/1", tmp_path / "loaded")
    words = ("3+4=", "--rollouts", "3", "--seed", "7")
    loaded = say("sample", str(tmp_path / "loaded"), *words)
    own = say("sample", f"artifacts/policies/{ROUND}", *words)
    assert own == loaded
    assert own[0] == 0
    assert say("sample", "artifacts/policies/base", *words)[0] == 0


def test_an_exported_policy_is_a_model_of_transformers(inside: Path, tmp_path: Path, say: Say):
    load_version("models:/solver/1", tmp_path / "loaded")
    for source in (f"artifacts/policies/{ROUND}", str(tmp_path / "loaded")):
        out = tmp_path / "exported"
        code, printed, err = say("export", source, str(out))
        assert (code, printed) == (0, f"{out}\n"), err
        model = AutoModelForCausalLM.from_pretrained(out)
        trained = load_file(f"artifacts/policies/{ROUND}/model.safetensors")
        assert all(torch.equal(trained[name], each) for name, each in model.named_parameters())
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer.decode(tokenizer("3+4=")["input_ids"], skip_special_tokens=True) == "3+4="
    (out / "config.json").write_text("{}")
    code, _, err = say("export", source, str(out))
    assert code == 2
    assert "must be free or an unchanged output of this command" in err
    code, _, err = say("export", "artifacts", str(tmp_path / "new"))
    assert code == 2
    assert "artifacts: holds no policy; name a directory that grpo load wrote" in err
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_drawn_ends_in_one_line(inside: Path, tmp_path: Path, say: Say):
    load_version("models:/solver/1", tmp_path / "loaded")
    for words, message in {
        ("load", "models:/solver@champion", "x"): "no such version",
        (
            "sample",
            "nowhere",
            "1+1=",
        ): "no such directory; name a directory that grpo load wrote, or a round's",
        ("sample", "artifacts", "1+1="): "artifacts: holds no policy; name a directory that grpo",
        ("sample", f"artifacts/policies/{ROUND}", ""): "PROMPT: must not be empty, got ''; write",
        (
            "sample",
            f"artifacts/policies/{ROUND}",
            "a\udcff",
        ): "PROMPT: must be Unicode, got",
        (
            "sample",
            f"artifacts/policies/{ROUND}",
            "1" * 100,
        ): f"artifacts/policies/{ROUND}: params.yaml: policy.max_steps: a prompt of 1",
        ("sample", str(tmp_path / "loaded"), "1+1=", "--rollouts", "0"): "must be >= 1, got 0",
    }.items():
        code, _, err = say(*words)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.long
def test_a_registry_behind_a_server_is_the_same(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load_version("models:/solver/1", tmp_path / "direct")
    with mlflow_server(tracking_uri(inside), free_port()) as address:
        assert listening() == {LOOPBACK}
        assert tracking_uri(inside) not in " ".join(commands())  # it may hold a password
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        again = Registry("solver").promote(ROUND, STRICT)
        assert (again.outcome, again.version) == (REFUSED, "2"), again.reason
        load_version("models:/solver@challenger", tmp_path / "served")
    for path in (tmp_path / "direct").rglob("*.safetensors"):
        served = tmp_path / "served" / path.relative_to(tmp_path / "direct")
        assert served.read_bytes() == path.read_bytes()
