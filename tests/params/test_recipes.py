"""Recipes that extend others: what they resolve to, the order of a chain, and what is refused."""

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import __main__ as commands
from grpo.errors import ParameterError
from grpo.params.parameters import read_params
from grpo.params.recipes import merge, read_content, resolved_text
from grpo.params.yaml import dump_yaml, parse_yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
WHOLE = [ROOT / "params.yaml", *(each for each in RECIPES if "\nextends:" not in each.read_text())]
SMOKE = ROOT / "recipes" / "smoke.yaml"
InProcess = Callable[..., tuple[object, str, str]]  # words -> exit code, stdout, stderr
# Mappings of equal shape: at each path, all hold a mapping or all a value.
VALUES = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2) | st.none()
SAME_SHAPE = st.fixed_dictionaries(
    {},
    optional={
        "a": VALUES,
        "b": st.fixed_dictionaries({}, optional={"c": VALUES, "d": VALUES}),
        "e": st.fixed_dictionaries(
            {}, optional={"f": st.dictionaries(st.sampled_from("gh"), VALUES)}
        ),
    },
)
ANY = st.recursive(
    VALUES, lambda inner: st.dictionaries(st.sampled_from("abcd"), inner), max_leaves=6
)
MAPPING = st.dictionaries(st.sampled_from("abcd"), ANY)


def write(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(dump_yaml(dict(content)))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_a_recipe_resolves_to_is_a_whole_file_with_the_same_parameters(
    tmp_path: Path, path: Path
):
    whole = tmp_path / "params.yaml"
    whole.write_text(resolved_text(path))
    assert read_content(whole) == read_content(path)
    assert read_params(whole) == read_params(path)
    assert resolved_text(whole) == whole.read_text()
    assert "extends" not in parse_yaml(whole.read_text())


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_file_that_extends_none_keeps_its_content_and_its_comments(path: Path):
    own = path.read_text()
    assert read_content(path) == parse_yaml(own)
    said = [line for line in own.splitlines() if not line.startswith("# yaml-language-server")]
    assert resolved_text(path).splitlines()[1:] == said


@settings(deadline=None)
@given(MAPPING)
def test_nothing_is_neutral_and_a_file_on_itself_is_itself(content: dict):
    assert merge({}, content) == merge(content, {}) == merge(content, content) == content


@settings(deadline=None)
@given(SAME_SHAPE, SAME_SHAPE, SAME_SHAPE)
def test_merging_is_associative_along_a_chain(first: dict, second: dict, third: dict):
    in_order = merge(merge(first, second), third)
    assert in_order == merge(first, merge(second, third))
    assert list(in_order) == list(merge(first, merge(second, third)))


@settings(deadline=None)
@given(MAPPING, MAPPING)
def test_every_value_is_that_of_the_last_file_that_says_it(base: dict, own: dict):
    merged = merge(base, own)
    assert {*merged} == {*base, *own}
    for key in merged:
        if key not in own:
            assert merged[key] == base[key]
        elif isinstance(own[key], dict) and isinstance(base.get(key), dict):
            assert merged[key] == merge(base[key], own[key])
        else:
            assert merged[key] == own[key]


@settings(deadline=None)
@given(MAPPING, MAPPING)
def test_a_parameter_that_is_left_out_is_only_that_of_the_file_itself(base: dict, own: dict):
    for key in base:
        merged = merge(base, own, {key})
        assert (key in merged) == (key in own)
        assert {**merged, key: None} == {**merge(base, own), key: None}
        if key in own:
            assert merged[key] == own[key]


def test_a_section_of_another_kind_replaces_that_of_the_base():
    base = {"policy": {"kind": "tokens", "lora": None, "base": {"source": "scratch", "config": 1}}}
    imported = {"source": "directory", "path": "a"}
    assert merge(base, {"policy": {"kind": "denoising"}}) == {"policy": {"kind": "denoising"}}
    assert merge(base, {"policy": {"base": imported}}) == {
        "policy": {"kind": "tokens", "lora": None, "base": imported}
    }
    same = {"policy": {"kind": "tokens", "lora": 1}}
    assert merge(base, same) == {"policy": {**base["policy"], "lora": 1}}


def test_a_file_may_extend_what_the_file_before_it_resolves_to(tmp_path: Path):
    """A chain is resolved from its end, each file on the whole of what it extends."""
    smoke = {"extends": str(SMOKE)}
    write(tmp_path / "a.yaml", {**smoke, "seed": 1, "task": {"train_prompts": 30}})
    arms = {"other": read_content(SMOKE)["arms"]["sgpo"]}
    rounds = {"other-1": {"arm": "other", "start": "base", "phase": 1}}
    b = {"extends": "a.yaml", "without": ["arms.sgpo", "rounds"], "arms": arms, "rounds": rounds}
    write(tmp_path / "b.yaml", b)
    c = {"seed": 3, "arms": {"other": {"training": {"learning_rate": 0.5}}}}
    write(tmp_path / "c.yaml", {"extends": "b.yaml", **c})
    (tmp_path / "whole.yaml").write_text(resolved_text(tmp_path / "b.yaml"))
    write(tmp_path / "short.yaml", {"extends": "whole.yaml", **c})
    found = read_content(tmp_path / "c.yaml")
    assert json.dumps(found) == json.dumps(read_content(tmp_path / "short.yaml"))
    params = read_params(tmp_path / "c.yaml")
    assert (params.seed, params.task.train_prompts) == (3, 30)
    assert [*params.arms] == ["other"]
    assert params.arms["other"].training.learning_rate == 0.5
    assert [*params.rounds] == ["other-1"]
    assert [*found] == [*read_content(SMOKE)]  # in the order of the first file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"extends": "none.yaml"}, r"extends must be a path relative to this file, \S+none"),
        ({"extends": 5}, "extends must be the path of a recipe, got 5"),
        ({"extends": None}, "extends must be the path of a recipe, got None"),
        ({"extends": "own.yaml"}, r"extends must not lead back to a file, got \S+own.yaml -> "),
        ({"extends": "../recipes/params.yaml"}, "extends must not name params.yaml"),
        ({"without": ["arms"]}, "without needs extends"),
        ({"extends": str(SMOKE), "without": "arms"}, "without must be a list of parameters"),
        ({"extends": str(SMOKE), "without": ["arms", "arms.sgp"]},
         r"without\[1\] must be a parameter of \S+smoke.yaml, got 'arms.sgp'; is it arms.sgpo\?"),
        ({"extends": str(SMOKE), "without": [["arms"]]}, r"without\[0\] must be a parameter of"),
        ({"extends": str(SMOKE), "without": ["rounds"]}, "rounds is missing"),
        ({"extends": str(SMOKE), "color": "red"}, "color is unknown, got 'red'"),
        ({"extends": str(SMOKE), "arms": {"sgpo": {"training": {"rate": 1}}}},
         "arms.sgpo.training.rate is unknown, got 1"),
        ({"extends": str(SMOKE), "task": {"kind": "glyphs"}}, "task.train_prompts is missing"),
        ({"extends": str(SMOKE), "policy": {"lora": float("inf")}}, "policy.lora must be a finite"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_in_one_line(tmp_path: Path, content: dict, message: str):
    file = write(tmp_path / "own.yaml", content)
    with pytest.raises(ParameterError, match=rf"^{file}: {message}") as raised:
        read_params(file)
    assert "\n" not in str(raised.value)


def test_a_loop_is_named_from_its_start(tmp_path: Path):
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        write(tmp_path / f"{name}.yaml", {"extends": f"{base}.yaml"})
    ways = " -> ".join(str(tmp_path / f"{name}.yaml") for name in "abcb")
    with pytest.raises(ParameterError, match=rf"c.yaml: extends must not .*, got {ways}$"):
        read_content(tmp_path / "a.yaml")


def test_a_broken_file_of_a_chain_is_named(tmp_path: Path):
    write(tmp_path / "a.yaml", {"extends": "b.yaml"})
    (tmp_path / "b.yaml").write_text("seed: [\n")
    with pytest.raises(ParameterError, match=rf"^{tmp_path / 'b.yaml'}: must be YAML"):
        read_content(tmp_path / "a.yaml")


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> InProcess:
    """Runs `grpo` in the test's folder without a start of Python."""

    def run_in_process(*words: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["grpo", *words])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code, *capsys.readouterr()

    return run_in_process


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_prints_and_writes_the_same_bytes(tmp_path: Path, in_process: InProcess):
    recipe = ROOT / "recipes" / "manipulation-dinov2.yaml"
    printed = run(tmp_path, "params", str(recipe))
    assert (printed.returncode, printed.stderr) == (0, "")
    assert run(tmp_path, "params", str(recipe), "--write").returncode == 0
    assert (tmp_path / "params.yaml").read_text() == printed.stdout == resolved_text(recipe)
    assert in_process("params") == (0, printed.stdout, "")


def test_a_wrong_recipe_leaves_the_parameters_of_the_run(tmp_path: Path, in_process: InProcess):
    (tmp_path / "params.yaml").write_bytes(SMOKE.read_bytes())
    write(tmp_path / "own.yaml", {"extends": str(SMOKE), "color": "red"})
    said = "own.yaml: color is unknown, got 'red'\n"
    assert in_process("params", "own.yaml", "--write") == (2, "", said)
    assert (tmp_path / "params.yaml").read_bytes() == SMOKE.read_bytes()


@pytest.mark.parametrize(
    ("own", "hint"),
    [
        ({"seeed": 4}, "seeed is unknown, got 4; is it seed?"),
        ({"policy": {"max_stepz": 4}}, "policy.max_stepz is unknown, got 4; is it max_steps?"),
        ({"policy.lora.rank": 4}, "policy.lora.rank is unknown, got 4"),
        ({"seed.x": 4}, "seed.x is unknown, got 4"),
    ],
)
def test_a_misspelt_parameter_beside_the_right_one_has_a_hint(
    tmp_path: Path, own: dict[str, Any], hint: str
):
    write(tmp_path / "own.yaml", {"extends": str(SMOKE), **own})
    with pytest.raises(ParameterError, match=re.escape(hint)):
        read_params(tmp_path / "own.yaml")


def test_the_parameters_that_are_replaced_are_kept(tmp_path: Path, in_process: InProcess):
    edited = SMOKE.read_text().replace("seed: ", "seed: 1")
    (tmp_path / "params.yaml").write_text(edited)
    for said in (f"{SMOKE}; .work/replaced-params.yaml holds those that it had\n", f"{SMOKE}\n"):
        code, _, err = in_process("params", str(SMOKE), "--write")
        assert (code, err) == (0, f"params.yaml: the parameters of {said}")
        assert Path("params.yaml").read_text() == resolved_text(SMOKE)
        assert Path(".work/replaced-params.yaml").read_text() == edited


@pytest.mark.long
def test_parameters_of_a_run_extend_no_recipe_and_the_message_says_what_to_run(tmp_path: Path):
    write(tmp_path / "params.yaml", {"extends": str(SMOKE), "seed": 4})
    done = run(tmp_path, "check")
    assert (done.returncode, done.stdout) == (2, "")
    advice = "mv params.yaml NAME.yaml && python -m grpo params NAME.yaml --write"
    assert done.stderr.startswith("params.yaml: extends must be in a recipe")
    assert done.stderr.endswith(f"; run {advice}\n")
    (tmp_path / "params.yaml").rename(tmp_path / "own.yaml")
    assert run(tmp_path, "params", "own.yaml", "--write").returncode == 0
    assert read_params(tmp_path / "params.yaml").seed == 4


@pytest.mark.long
def test_the_example_of_the_page_resolves_to_one_round_of_one_arm(tmp_path: Path):
    page = (ROOT / "docs" / "recipes.md").read_text()
    (shown,) = re.findall(r"^    extends: .*\n(?:    .*\n|\n)+", page, flags=re.MULTILINE)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "own.yaml").write_text(textwrap.dedent(shown))
    params = read_params(tmp_path / "own.yaml")
    assert (params.task.train_prompts, [*params.arms], [*params.rounds]) == (
        600,
        ["sgpo"],
        ["first"],
    )
    assert params.arms["sgpo"].training.learning_rate == 0.0003
    assert run(tmp_path, "check", "own.yaml").returncode == 0
