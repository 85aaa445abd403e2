"""The schemas for editors: those of the models, and of every file that names one."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from grpo import __main__ as commands
from grpo.errors import ParameterError
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml, parse_yaml
from tests.params.test_params import changed

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "params.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]
SMOKE, GLYPHS = (ROOT / "recipes" / f"{name}.yaml" for name in ("smoke", "glyphs"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@cache
def committed(name: str) -> Draft202012Validator:
    """Returns the validator of a committed schema."""
    return Draft202012Validator(json.loads((ROOT / "docs" / f"{name}.schema.json").read_text()))


def problems(name: str, content: Any) -> list[str]:
    return [
        f"{each.json_path}: {each.message[:200]}" for each in committed(name).iter_errors(content)
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [("params", []), pytest.param("recipe", ["--recipe"], marks=pytest.mark.long)],
)
def test_the_committed_schema_is_what_the_command_prints(
    name: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """If it fails, run `grpo schema --write`."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["grpo", "schema", *options])
    with pytest.raises(SystemExit, match=r"^0$"):
        commands.main()
    printed = capsys.readouterr().out
    assert printed == (ROOT / "docs" / f"{name}.schema.json").read_text()
    Draft202012Validator.check_schema(json.loads(printed))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_fits_the_schema_that_its_first_line_names(path: Path):
    said = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert said
    schema = path.parent / said[1]
    assert schema.resolve().parent == ROOT / "docs"
    name, own = schema.name.removesuffix(".schema.json"), parse_yaml(path.read_text())
    assert name == ("recipe" if "extends" in own else "params")
    assert problems(name, own) == []
    assert problems("params", read_content(path)) == []


@pytest.mark.parametrize("section", ["task", "policy", "reward", "arms", "evaluation", "machine"])
def test_every_part_of_a_whole_file_fits_the_schema_of_recipes(section: str):
    for path in FILES:
        content = read_content(path)[section]
        assert problems("recipe", {"extends": "a", section: content}) == []
        for key, value in content.items():
            assert problems("recipe", {"extends": "a", section: {key: value}}) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", "zero"),
        ("color", "red"),
        ("task.kind", "poetry"),
        ("task.train_prompts", 0),
        ("policy.kind", "denoising"),
        ("policy.base.source", "hub"),
        ("policy.base.warmup.updates", 1.5),
        ("reward.threshold", 1.5),
        ("reward.judges", []),
        ("reward.judges.0.judge", "taste"),
        ("evaluation.sampling", {"num_steps": 0}),
        ("arms.sgpo.sampling.top_p", 0),
        ("arms.sgpo.training.learning_rat", 0.1),
        ("arms.sgpo.training.betas", [0.9]),
        ("arms.sgpo.objective", [{"rloo": {"lo": 0.2}}]),
        ("arms.sgpo.objective", ["penalize_kl"]),
        ("arms.sgpo.curriculum", [{"fix_group_size": {}}]),
        ("arms.sgpo.selection", ["rloo"]),
        ("rounds", {"a.b": {"arm": "sgpo", "start": "base", "phase": 1}}),
    ],
)
def test_a_wrong_value_fits_neither_schema(tmp_path: Path, path: str, value: object):
    content = read_content(changed(tmp_path, (path, value), recipe=SMOKE))
    assert problems("params", content)
    assert problems("recipe", {"extends": "a", **content})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", None),
        ("policy.max_steps", None),
        ("arms.sgpo.training", None),
        ("rounds", None),
        ("policy.lora.alpha", ("policy.lora", {"rank": 8})),
        ("rounds.sgpo-1.start", ("rounds.sgpo-1", {"arm": "sgpo"})),
    ],
)
def test_a_missing_value_is_wrong_in_a_whole_file_only(
    tmp_path: Path, path: str, value: tuple[str, object] | None
):
    file = changed(tmp_path, value or (path, None), recipe=SMOKE)
    content = read_content(file)
    assert problems("params", content)
    assert problems("recipe", {"extends": "a", **content}) == []
    with pytest.raises(ParameterError, match=f"{path} is missing"):
        read_params(file)


def test_a_recipe_must_say_what_it_extends_and_a_whole_file_must_not():
    content = read_content(SMOKE)
    assert problems("recipe", content)
    assert problems("params", {"extends": "smoke.yaml", **content})
    assert problems("recipe", {"extends": "smoke.yaml", "without": ["arms.sgpo"]}) == []
    assert problems("recipe", {"extends": "smoke.yaml", "without": "arms"})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_sections_on_a_page_fit_the_schema_of_recipes(path: Path):
    """What reads parameters accepts them, so the schema must."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    arm_keys = {"objective", "curriculum", "selection", "training"}
    for block in blocks:
        for key, value in parse_yaml(block).items():
            if key in arm_keys:
                assert problems("recipe", {"extends": "a", "arms": {"a": {key: value}}}) == []
            elif key in ("task", "policy", "reward"):
                assert problems("recipe", {"extends": "a", key: value}) == []


def test_every_link_and_algorithm_can_be_completed():
    schema = committed("params").schema
    alone, _, named = schema["$defs"]["Arm"]["properties"]["objective"]["items"]["anyOf"]
    assert {*named["properties"]} == {*LINKS, *ALGORITHMS}
    assert {*alone["enum"]} == {
        name for name, each in named["properties"].items() if not each["required"]
    }


def test_hover_text_is_the_comment_or_the_docstring_of_the_source():
    schema = committed("params").schema
    definitions = schema["$defs"]
    training = definitions["Training"]["properties"]
    assert (
        training["tokens_per_microbatch"]["description"] == "rows times width of one forward pass"
    )
    assert training["stored_rollouts"]["description"] == (
        "What is kept of the rollouts that later iterations than the first have sampled."
    )
    assert definitions["Lora"]["description"] == (
        "Low-rank adapters; the base's weights stay frozen."
    )
    undescribed = [name for name, each in definitions.items() if "description" not in each]
    assert undescribed == []


def test_the_schema_leaves_rules_across_sections_to_the_reader(tmp_path: Path):
    """An arm of images in a run of texts: each section alone is right."""
    content = read_content(SMOKE)
    content["arms"]["sgpo"]["sampling"] = read_content(GLYPHS)["arms"]["flow"]["sampling"]
    assert problems("params", content) == []
    (tmp_path / "params.yaml").write_text(dump_yaml(content))
    with pytest.raises(ParameterError, match=r"arms.sgpo.sampling.temperature is missing"):
        read_params(tmp_path / "params.yaml")
