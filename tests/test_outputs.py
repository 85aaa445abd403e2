"""Commands and stages replace only their own outputs."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import ArtifactError
from grpo.params.recorded import require_own_outs
from grpo.params.yaml import parse_yaml
from grpo.runtime.artifacts.files import atomic_path, named_output
from tests.files import contents

ROOT = Path(__file__).parents[1]
PIPELINE = parse_yaml((ROOT / "dvc.yaml").read_text())["stages"]


def write_directory(path: Path) -> None:
    with named_output(path) as temporary:
        temporary.mkdir()
        (temporary / "policy").mkdir()
        (temporary / "policy" / "weights").write_bytes(os.urandom(8))


def write_svg(path: Path) -> None:
    with named_output(path) as temporary:
        temporary.write_text(f"<svg>{os.urandom(4).hex()}</svg>\n")


def add_file(path: Path) -> None:
    """A directory that also has files of the user."""
    if path.is_file():
        path.write_bytes(path.read_bytes() + b"<!-- my note -->")
    else:
        path.mkdir(exist_ok=True)
        (path / "thesis.tex").write_text("years of work")


def add_directory(path: Path) -> None:
    if path.is_file():
        path.unlink()
    (path / "policy" / "inner").mkdir(parents=True)
    (path / "policy" / "inner" / "thesis.tex").write_text("years of work")


def change_file(path: Path) -> None:
    for each in [path, *path.rglob("*")]:
        if each.is_file():
            each.write_bytes(each.read_bytes().replace(b"e", b"E") + b" changed by hand")
            return
    path.write_text("a file of a person")


def replace_by_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    if path.exists():
        path.rename(path.parent / "moved")
    path.symlink_to(target)


FOREIGN = (add_file, add_directory, change_file, replace_by_link)
WRITERS = (write_directory, write_svg)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("earlier", [None, *WRITERS])
@pytest.mark.parametrize("spoil", FOREIGN)
def test_what_a_person_put_there_or_changed_is_never_replaced(
    tmp_path: Path,
    write: Callable[[Path], None],
    earlier: Callable[[Path], None] | None,
    spoil: Callable[[Path], None],
):
    target = tmp_path / "target"
    if earlier:
        earlier(target)
    spoil(target)
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"must be free or an unchanged output") as told:
        write(target)
    assert "\n" not in str(told.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("write", WRITERS)
def test_what_the_command_wrote_itself_is_replaced(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    target = Path("target")
    write(target)
    before = contents(tmp_path)
    write(target)
    assert contents(tmp_path).keys() == before.keys()
    assert contents(tmp_path) != before


def test_an_empty_directory_is_a_free_place(tmp_path: Path):
    (tmp_path / "target").mkdir()
    write_directory(tmp_path / "target")
    assert (tmp_path / "target" / "policy" / "weights").exists()


def write_anything(path: Path, *, is_directory: bool) -> None:
    with atomic_path(path) as temporary:
        temporary.mkdir() if is_directory else temporary.write_text("a file")


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_file_never_replaces_a_directory_nor_a_directory_a_file(
    tmp_path: Path, is_directory: bool
):
    target = tmp_path / "target"
    if is_directory:
        target.write_text("a file")
    else:
        add_file(target)
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"target: must be a .* or free"):
        write_anything(target, is_directory=is_directory)
    assert contents(tmp_path) == before


def outs_of(content: dict[str, Any]) -> list[str]:
    """Returns the outputs of a stage of dvc.yaml."""
    listed = [each for kind in ("outs", "metrics", "plots") for each in content.get(kind, [])]
    return [next(iter(each)) if isinstance(each, dict) else each for each in listed]


def words_of(content: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the module of a stage of dvc.yaml, and its path by parameter of `main`."""
    _, _, module, *paths = content["cmd"].split()
    main = importlib.import_module(module).main
    names = [name for name in inspect.signature(main).parameters if name != "usage"]
    return module.removeprefix("stages."), dict(zip(names, paths, strict=True))


STAGES = {name: content.get("do", content) for name, content in PIPELINE.items()}


@pytest.mark.parametrize("name", STAGES)
def test_the_outputs_of_a_stage_are_the_parameters_whose_names_say_so(name: str):
    _, paths = words_of(STAGES[name])
    outs = outs_of(STAGES[name])
    said = {path for parameter, path in paths.items() if parameter.endswith("out")}
    read = set(paths.values()) - said
    assert all(any(Path(out).is_relative_to(path) for path in said) for out in outs)
    assert all(any(Path(out).is_relative_to(path) for out in outs) for path in said)
    assert not any(Path(out) == Path(path) for out in outs for path in read)


@pytest.mark.parametrize("name", [name for name in STAGES if outs_of(STAGES[name])])
def test_a_stage_that_is_given_a_wrong_path_replaces_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Each of its outs, given files and directories of a person and of other stages."""
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    wrong = ["data/prompts.jsonl", "artifacts/thesis", "artifacts", "data", ".", "dvc.yaml"]
    for path in map(Path, wrong[:2]):
        path.parent.mkdir()
        path.write_text("of a person")
    module, spelled = words_of(STAGES[name])
    paths = {parameter: Path(path.replace("${key}", "a-1")) for parameter, path in spelled.items()}
    for parameter in [each for each in paths if each.endswith("out")]:
        for path in wrong:
            with pytest.raises(ArtifactError, match=r"exists and is not an output of stage"):
                require_own_outs(module, {**paths, parameter: Path(path)})
        for other in [each for each in paths if spelled[each] != spelled[parameter]]:
            paths[other].parent.mkdir(parents=True, exist_ok=True)
            paths[other].touch()
            with pytest.raises(ArtifactError, match=r"exists and is not an output of stage"):
                require_own_outs(module, {**paths, parameter: paths[other]})
    require_own_outs(module, paths)
    require_own_outs(module, {name: path.absolute() for name, path in paths.items()})


def test_a_stage_says_in_one_line_that_it_would_replace_a_file_of_a_person(tmp_path: Path):
    (tmp_path / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "stages.check", "params.yaml", "data", "params.yaml", "a", "b"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(
        "params.yaml: exists and is not an output of stage check, which writ"
    )
    assert contents(tmp_path) == before


def test_a_link_to_a_larger_disk_is_refused_before_a_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """DVC refuses it when the stage has run."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "workspace").mkdir()
    monkeypatch.chdir(tmp_path / "workspace")
    Path("artifacts").symlink_to(tmp_path / "disk")
    with pytest.raises(ArtifactError, match=r"a link leads to .*disk.* run dvc cache dir DIRECT"):
        require_own_outs(
            "score", {"prompts": Path("a"), "out": Path("artifacts/rewards/a.parquet")}
        )
