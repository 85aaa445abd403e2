"""The laws of docs/security.md that need no finished run."""

import ast
import importlib
import inspect
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS
from transformers import AutoModelForCausalLM

import grpo.lineage
from flows.ui import serve_until_stopped
from grpo.errors import ArtifactError, GrpoError, ParameterError, brief, without_credentials
from grpo.modalities.shared.models import read_model
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.registry.store import Registry
from grpo.rewards.base import Task
from grpo.rewards.reasoning_gym import EVALUATED, score_answer
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.storage.upload import upload_directory
from grpo.sampling.judging import judge_text
from grpo.schema import DirectoryBase
from grpo.wiring.policies import draws_of_evaluation, load_policy, load_sampler

ROOT = Path(__file__).parents[1]
CODE = [
    path
    for folder in ("grpo", "stages", "flows", "benchmarks")
    for path in ROOT.glob(f"{folder}/**/*.py")
]
PICKLING = {"cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
RUNNING = {
    "eval", "exec", "os.popen", "os.system", "torch.load", "tarfile.open", "tempfile.mktemp",
    "yaml.full_load", "yaml.load", "yaml.unsafe_load", "shutil.unpack_archive", "zipfile.ZipFile",
}  # fmt: skip
FORBIDDEN = {"allow_pickle": True, "shell": True, "weights_only": False, "trust_remote_code": True}
# Families that run only what their own generators wrote, never an answer.
OWN_CODE = {
    "basic_arithmetic", "bitwise_arithmetic", "codeio", "gsm_symbolic", "number_sorting",
    "propositional_logic",
}  # fmt: skip
PASSWORD = "planted0password"


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yields names that may run foreign code or open a port."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] in PICKLING)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING:
                yield module
            case ast.Call(func=func, keywords=given):
                name = ast.unparse(func)
                if name in RUNNING:
                    yield name
                values = {each.arg: getattr(each.value, "value", None) for each in given}
                yield from (key for key, bad in FORBIDDEN.items() if values.get(str(key)) == bad)
            case ast.Constant(value="0.0.0.0" | "::" as host):
                yield host


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_unpickles_evaluates_or_opens_a_shell_or_a_port(path: Path):
    assert list(dangers(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
        "bind(('0.0.0.0', 80))",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str):
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/name:os.kill", "!x"])
def test_yaml_builds_no_objects(tag: str):
    with pytest.raises(ArtifactError, match="could not determine a constructor"):
        parse_yaml(f"a: {tag} [id]")


def test_mlflow_unpickles_nothing_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    importlib.reload(grpo.lineage)
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


@pytest.mark.parametrize(
    "uri",
    [
        f"https://someone:{PASSWORD}@host/path",
        f"postgresql+psycopg://someone:{PASSWORD}/with@signs@host:5432/db",
        f"http://{PASSWORD}@host",
        f"s3://AKIA0:{PASSWORD}/more@bucket/key",
    ],
)
def test_no_error_line_holds_the_credentials_of_a_url(uri: str):
    said = without_credentials(f"cannot reach {uri}: refused")
    assert PASSWORD not in said
    assert re.fullmatch(r"cannot reach \w[\w+]*://\*\*\*@[\w/:]+: refused", said)
    assert str(ArtifactError(f"{uri}: is lost")).startswith(uri.partition("//")[0])
    for error in (GrpoError(uri), ParameterError(uri)):
        assert PASSWORD not in repr(error) + str(error)
    # A password that is cut in the middle could not be recognized.
    assert PASSWORD[:4] not in brief("x" * 180 + f" {uri}")


@pytest.mark.parametrize(
    "text", ["models:/solver@champion", "http://127.0.0.1:5000: no", "sqlite:////a/b@c/mlflow.db"]
)
def test_what_holds_no_credentials_is_said_as_it_is(text: str):
    assert without_credentials(text) == text


@pytest.mark.parametrize("scheme", ["http", "nonsense"])
def test_an_mlflow_out_of_reach_is_one_line_without_its_password(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}://someone:{PASSWORD}@127.0.0.1:1")
    with pytest.raises(ArtifactError) as error:
        Registry("solver", tmp_path)
    assert str(error.value).startswith(f"{scheme}://***@127.0.0.1:1: cannot be read or written")
    assert PASSWORD not in str(error.value)
    assert "\n" not in str(error.value)


def test_the_pages_are_announced_without_a_password(capsys: pytest.CaptureFixture[str]):
    class Pages(dict[str, str]):
        def items(self) -> Any:
            yield from super().items()
            raise KeyboardInterrupt  # once all are said

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        pages = Pages(mlflow=f"https://someone:{PASSWORD}@host")
        assert serve_until_stopped(lambda stack: pages) == 0
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert capsys.readouterr().out == "mlflow  https://***@host\n"


def question(family: str, size: int = 1) -> list[Task]:
    """Returns tasks of a family with their own answers."""
    entries = list(DATASETS[family][0](DATASETS[family][1](size=size, seed=1)))
    return [
        Task(family=family, prompt="", answer=each["answer"].strip(), entry=dict(each))
        for each in entries
    ]


def scored(answer: str, task: Task) -> tuple[float, str]:
    return judge_text(score_answer, answer, task, answer_pattern="(?s)^(.*)$", timeout_seconds=20.0)


@pytest.mark.parametrize("family", sorted(EVALUATED))
def test_no_judge_runs_what_a_policy_writes(family: str, tmp_path: Path):
    (task,) = question(family)
    target = tmp_path / "written"
    for attack in (
        f"__import__('pathlib').Path('{target}').touch()",
        f"open('{target}', 'w')",
        f"(open)('{target}', 'w')",
        f"[x('{target}', 'w') for x in [open]]",
        f"[sin:=open, sin('{target}', 'w')]",
        f"S(\"open('{target}', 'w')\")",
        f"1 if open('{target}', 'w') else 0",
        "\uff45xec(chr(49))",
    ):
        assert scored(attack, task)[:2] == (0.0, "unparsable")
    assert not target.exists()


@pytest.mark.parametrize("family", sorted(EVALUATED))
def test_the_same_judges_still_know_their_own_answers(family: str):
    for task in question(family, size=5):
        assert scored(task.answer, task)[:2] == (1.0, "scored"), task.answer


def test_every_family_whose_judge_may_run_an_answer_is_known():
    runs = re.compile(r"(?<![\w.])(eval|exec)\(|parse_expr\(|sympify\(")
    found = {
        family
        for family, (dataset, _) in DATASETS.items()
        if runs.search(Path(inspect.getfile(dataset)).read_text())
    }
    assert found <= EVALUATED | OWN_CODE
    assert found >= EVALUATED


def changed(tmp_path: Path, path: str, value: Any) -> Path:
    """Returns a copy of params.yaml with one parameter changed."""
    params = parse_yaml((ROOT / "params.yaml").read_text())
    *parents, last = path.split(".")
    place = params
    for each in parents:
        place = place[each]
    place[last] = value
    (tmp_path / "params.yaml").write_text(dump_yaml(params))
    return tmp_path / "params.yaml"


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a/../../b"])
def test_parameters_name_files_below_data_only(tmp_path: Path, name: str):
    files = {"train": "train.jsonl", "eval": name}
    jsonl = {"kind": "jsonl", "directory": None, **files, "columns": {}, "instruction": ""}
    for path, value, where in [
        ("policy.base", {"source": "directory", "path": name}, "policy.base.path"),
        ("task", jsonl, "task.eval"),
    ]:
        with pytest.raises(ParameterError) as error:
            read_params(changed(tmp_path, path, value))
        assert f": {where} must lie under data/, got {name!r}" in str(error.value)


def test_a_uri_with_credentials_is_no_parameter_and_is_not_said(tmp_path: Path):
    base = {"source": "s3", "uri": f"s3://AKIA0:{PASSWORD}@bucket/key", "sha256": "0" * 64}
    with pytest.raises(ParameterError, match=r"policy\.base\.uri .*, got 's3://\*\*\*@bucket"):
        read_params(changed(tmp_path, "policy.base", base))


def model_with_code(directory: Path, target: Path) -> None:
    """Writes a model directory with custom code that transformers would run."""
    directory.mkdir(parents=True)
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    write_json(directory / "config.json", {"model_type": "own", "auto_map": auto_map})
    code = f"open({json.dumps(str(target))}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (directory / "own.py").write_text(code)


def test_code_beside_weights_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "written"
    model_with_code(tmp_path / "data" / "model", target)
    monkeypatch.setattr("builtins.input", lambda asked: "y")  # a person who agrees to everything
    imported = DirectoryBase(source="directory", path="model")
    with pytest.raises(ParameterError, match=r"policy\.base '.*model' cannot be loaded") as error:
        read_model(AutoModelForCausalLM, imported, tmp_path / "data", parameter="policy.base")
    assert "\n" not in str(error.value)
    params = read_params(ROOT / "params.yaml")
    draws = draws_of_evaluation(params)["sampled"]
    directory = tmp_path / "data" / "model"
    for load in (load_policy, load_sampler):
        with pytest.raises(ArtifactError, match=r"own\.py: may hold a pickle or code"):
            load(params, base=directory, directory=directory, draws=draws)
    assert not target.exists()


def test_a_link_that_leads_out_of_a_directory_is_not_uploaded(tmp_path: Path):
    (tmp_path / "secret").write_text("what lies elsewhere")
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "state.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError, match=r"state\.json: links out of its directory"):
        upload_directory(tmp_path / "policy", "s3://bucket/key")
