"""Stages depend on the files under data/ that they read, and on no other."""

from pathlib import Path
from typing import Any, get_args

import pytest

from grpo.errors import ArtifactError, ParameterError
from grpo.params.manifests import Reader, describe_data, require_described
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.artifacts.files import canonical_json, write_bytes, write_json
from grpo.runtime.artifacts.usage import Usage
from grpo.schema import DATA
from stages import check

ROOT = Path(__file__).parents[2]
STAGES = parse_yaml((ROOT / "dvc.yaml").read_text())["stages"]
READERS: tuple[Reader, ...] = get_args(Reader)
NAMED: dict[str, Reader] = {
    "data/pictures/train.jsonl": "task",
    "data/pictures/eval.jsonl": "task",
    "data/own/model_index.json": "base",
    "data/own/vae/config.json": "base",
    "data/clip/model.safetensors": "judge",
}
OTHERS = ("data/notes.txt", "data/pictures/README", "data/own-2/config.json", "data/clip.txt")


@pytest.fixture(autouse=True)
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parameters:
    """Of a workspace whose prompts, base policy and judge all lie under data/."""
    monkeypatch.chdir(tmp_path)
    for name in NAMED:
        write_bytes(Path(name), name.encode())
    content = read_content(ROOT / "recipes/images-sd35.yaml")
    content["policy"]["base"] = {"source": "directory", "path": "own"}
    content["reward"]["judges"][0]["model"] = {"source": "directory", "path": "clip"}
    Path("params.yaml").write_text(dump_yaml(content))
    return read_params()


def described(params: Parameters) -> dict[Reader, bytes]:
    return {each: canonical_json(describe_data(params, DATA, each)) for each in READERS}


def test_only_check_and_lineage_run_again_for_any_file_under_data():
    whole = {name for name, each in STAGES.items() if "data" in each.get("do", each)["deps"]}
    assert whole == {"check", "lineage"}


def test_a_file_that_no_parameter_names_changes_no_manifest(params: Parameters):
    before = described(params)
    for name in OTHERS:
        write_bytes(Path(name), b"new")
    assert described(params) == before


@pytest.mark.parametrize("name", NAMED)
def test_a_file_that_is_named_changes_the_manifest_of_its_reader_alone(
    params: Parameters, name: str
):
    before = described(params)
    assert {each for each in READERS if name.encode() in before[each]} == {NAMED[name]}
    write_bytes(Path(name), b"changed")
    after = described(params)
    assert {each for each in READERS if after[each] != before[each]} == {NAMED[name]}


def test_stage_check_writes_what_stages_compare(params: Parameters):
    outs = ("needed.json", "artifacts/data", "artifacts/plugins")
    check.main(Usage(), *map(Path, ("params.yaml", "data", *outs)))
    for reader in READERS:
        require_described(Path(f"artifacts/data/{reader}.json"), params, DATA, reader)


@pytest.mark.parametrize("change", ["another content", "gone", "new"])
def test_a_stage_reads_nothing_that_check_has_not_seen(params: Parameters, change: str):
    name = Path("data/own/vae/" + ("config.json" if change != "new" else "more.json"))
    write_json(Path("base.json"), describe_data(params, DATA, "base"))
    name.unlink() if change == "gone" else write_bytes(name, b"other")
    with pytest.raises(ArtifactError, match=rf"^{name}: differs from base\.json, it has chang"):
        require_described(Path("base.json"), params, DATA, "base")


def test_a_manifest_that_is_none_is_refused(params: Parameters):
    write_json(Path("base.json"), [])
    with pytest.raises(ArtifactError, match=r"^base\.json: must hold a hash for each file; rerun"):
        require_described(Path("base.json"), params, DATA, "base")


@pytest.mark.parametrize("reader", READERS)
def test_what_is_named_and_not_there_is_refused_before_anything_runs(
    params: Parameters, reader: Reader
):
    DATA.rename("elsewhere")
    with pytest.raises(ParameterError, match=r"^params\.yaml: .* must be a (file|directory), data"):
        describe_data(params, DATA, reader)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_directory_that_a_recipe_names_is_described(recipe: Path):
    """However deep its parameters lie."""
    content = read_content(recipe)
    paths = list(_directories(content))
    for path in paths:
        write_bytes(DATA / path / "config.json", b"{}")
    for split in ("train", "eval"):
        if split in content["task"]:
            write_bytes(DATA / content["task"][split], b"{}")
    found = described(read_params(recipe))
    assert all(f"data/{path}/config.json" in b"".join(found.values()).decode() for path in paths)


def _directories(value: Any) -> list[str]:
    if isinstance(value, list):
        return [path for each in value for path in _directories(each)]
    if not isinstance(value, dict):
        return []
    own = [value["path"]] if value.get("source") == "directory" else []
    return own + [path for each in value.values() for path in _directories(each)]
