"""JSON schemas of params.yaml and of recipes, with which an editor completes and explains them."""

import ast
import copy
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema

from grpo.modalities import all_modalities
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.params.parameters import Arm, JudgeParams, Parameters, WeightedJudge
from grpo.params.recipes import EXTENDS, WITHOUT
from grpo.rewards import find_judge, judge_names
from grpo.runtime.plugins import PLUGINS
from grpo.schema import NAME, Strict
from grpo.tasks import find_task, task_kinds
from grpo.wiring.allocation import CURRICULUM_STEPS, SELECTION_STEPS

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN_KEYS: Schema = {
    EXTENDS: {
        "type": "string",
        "description": "Path of the recipe that this file extends, relative to this file.",
    },
    WITHOUT: {
        "type": "array",
        "items": {"type": "string"},
        "description": "Dotted paths of parameters of that recipe that are left out or replaced.",
    },
}
CHOICES = ("oneOf", "anyOf")
OF_PLUGINS = rf"^{PLUGINS}\."  # names of parts of a user, whose settings are not known here
OWN_PART: Schema = {"type": "string", "pattern": OF_PLUGINS}
OWN_SECTION: Schema = {"type": "object", "properties": {"kind": OWN_PART}, "required": ["kind"]}


class _Described(GenerateJsonSchema):
    """Describes fields by their comments in the source; writes no titles, which repeat names."""

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        found = super().model_schema(schema)
        found.pop("title", None)
        if "description" in found:
            found["description"] = " ".join(found["description"].split())
        for name, text in _comments_of_fields(schema["cls"]).items():
            found["properties"][name] = {"description": text, **found["properties"][name]}
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def params_schema() -> Schema:
    """Returns the schema of params.yaml, a whole file.

    What only depends on several parameters, such as the rounds of an arm, it does not check; run
    `grpo check`.
    """
    kinds = all_modalities().values()
    policies = [each.policy for each in kinds]
    tasks = [find_task(each) for each in task_kinds()]
    samplings = list(dict.fromkeys(each.sampling for each in kinds))
    draws = list(dict.fromkeys(each.evaluation_sampling for each in kinds))
    of_judges = [each for name in judge_names() if (each := find_judge(name).settings)]
    models: list[type[BaseModel]] = [Parameters, *policies, *tasks, *samplings, *draws, *of_judges]
    places, whole = models_json_schema(
        [(each, "validation") for each in models], schema_generator=_Described
    )
    definitions = whole["$defs"]
    root = definitions.pop("Parameters")

    def choose(way: str, chosen: Sequence[type[BaseModel]], *others: Schema) -> Schema:
        return {way: [*(places[each, "validation"] for each in chosen), *others]}

    root["properties"]["task"] |= choose("oneOf", tasks, copy.deepcopy(OWN_SECTION))
    root["properties"]["policy"] |= choose("oneOf", policies, copy.deepcopy(OWN_SECTION))
    for name in ("arms", "rounds"):
        root["properties"][name]["propertyNames"] = {"pattern": f"^{NAME.pattern}$"}
    evaluation = definitions[_name_of(root["properties"]["evaluation"])]
    evaluation["properties"]["sampling"] |= choose("anyOf", draws)
    for judged in (JudgeParams, WeightedJudge):
        given = definitions[judged.__name__]["properties"]
        given["judge"]["anyOf"] = [{"enum": list(judge_names())}, OWN_PART]
        given["settings"] |= choose("anyOf", of_judges, {"type": "null"})
    definitions.pop(Strict.__name__)  # that of any settings
    arm = definitions[Arm.__name__]["properties"]
    arm["sampling"] |= choose("anyOf", samplings)
    tables: dict[str, Mapping[str, Callable[..., Any]]] = {
        "curriculum": CURRICULUM_STEPS,
        "selection": SELECTION_STEPS,
        "objective": {**LINKS, **ALGORITHMS},
    }
    for name, table in tables.items():
        arm[name]["items"] = _one_of_functions(table)
    return {"$schema": DIALECT, "title": "params.yaml", **root, "$defs": definitions}


def recipe_schema() -> Schema:
    """Returns the schema of a recipe that extends another: of the same keys, none is required.

    A list replaces that of the other recipe, so its items are whole.
    """
    whole = params_schema()
    definitions = whole.pop("$defs")
    for name in _merged_definitions(whole, definitions):
        _relax(definitions[name])
    _relax(whole)
    properties = {**OWN_KEYS, **whole.pop("properties")}
    head = {"title": "recipe", "required": [EXTENDS], "properties": properties}
    return {**whole, **head, "$defs": definitions}


def _name_of(reference: Mapping[str, Any]) -> str:
    """Returns the name of the definition that a schema refers to."""
    return str(reference["$ref"]).rpartition("/")[2]


def _merged_definitions(schema: Any, definitions: Mapping[str, Schema]) -> set[str]:
    """Returns the definitions that a schema refers to, but not those of items of lists only."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if "$ref" in each and _name_of(each) not in found:
            found.add(_name_of(each))
            waiting.append(definitions[_name_of(each)])
        waiting += _merged_parts(each)
    return found


def _relax(schema: Any) -> None:
    """Removes, in place, what a part of a mapping need not have; leaves items of lists whole.

    Parts of several kinds may be equal, so that of several choices more than one may fit.
    """
    if not isinstance(schema, dict):
        return
    for key in ("required", "minProperties", "discriminator"):
        schema.pop(key, None)
    if "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")
    for each in _merged_parts(schema):
        _relax(each)


def _merged_parts(schema: Schema) -> list[Any]:
    """Returns the schemas of values that are merged key by key with those of another recipe."""
    parts = [*schema.get("properties", {}).values(), schema.get("additionalProperties")]
    return parts + [each for way in CHOICES for each in schema.get(way, [])]


def _one_of_functions(table: Mapping[str, Callable[..., Any]]) -> Schema:
    """Returns the schema of a link or step: its name, or its name with settings."""
    settings = {name: _settings_of(function) for name, function in sorted(table.items())}
    named = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": settings,
        "patternProperties": {OF_PLUGINS: {"type": "object"}},
    }
    alone = [name for name, each in settings.items() if not each["required"]]
    return {"anyOf": [*([{"enum": alone}] if alone else []), OWN_PART, named]}


def _settings_of(function: Callable[..., Any]) -> Schema:
    """Returns the schema of the settings of a link or step, described by its docstring."""
    known = inspect.signature(function).parameters
    about, *_ = (inspect.getdoc(function) or "").split("\n\n")
    told = _described_arguments(function)
    properties: Schema = {}
    for name, each in known.items():
        properties[name] = TypeAdapter(each.annotation).json_schema()
        if each.default is not each.empty:
            properties[name]["default"] = each.default
        if name in told:
            properties[name]["description"] = told[name]
    return {
        "type": "object",
        "description": " ".join(about.split()),
        "additionalProperties": False,
        "properties": properties,
        "required": [name for name, each in known.items() if each.default is each.empty],
    }


def _described_arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the texts of the section Args of a function's docstring by argument."""
    section = re.search(r"^Args:\n((?:  .*\n?|\n)*)", inspect.getdoc(function) or "", re.MULTILINE)
    entries = re.findall(
        r"^  (\w+): (.*(?:\n    .*)*)", section[1] if section else "", re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}


def _comments_of_fields(model: type[BaseModel]) -> dict[str, str]:
    """Returns the comments on and directly above each field in the source of a model."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, BaseModel) and not each.__module__.startswith("pydantic"):
            found |= _own_comments(each)
    return {name: text for name, text in found.items() if name in model.model_fields}


def _own_comments(model: type[BaseModel]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(model))
    comments = dict(_comments_by_line(source))
    lines = source.splitlines()
    (parsed,) = ast.parse(source).body
    assert isinstance(parsed, ast.ClassDef)
    found = {}
    for field in parsed.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            first = field.lineno
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            numbers = range(first, (field.end_lineno or field.lineno) + 1)
            texts = [comments[number] for number in numbers if number in comments]
            if texts:
                found[field.target.id] = " ".join(texts)
    return found


def _comments_by_line(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
            yield token.start[0], token.string.removeprefix("#").strip()
