"""A recipe for a model directory of one's own, made from a recipe for another model."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.errors import ParameterError, UnsoundError
from grpo.objective.rules import Severity
from grpo.params.parameters import BASE, Parameters, naming, read_params
from grpo.params.recipes import EDITOR, EXTENDS, RECIPE_SCHEMA
from grpo.params.yaml import dump_yaml
from grpo.runtime.artifacts.files import WORK, atomic_path, read_json
from grpo.runtime.machine import prepare_machine
from grpo.schema import DATA, PARAMS
from grpo.wiring.checks import findings
from grpo.wiring.policies import build_base, draws_of_evaluation, load_policy

CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZER = "tokenizer_config.json"


def write_recipe(recipe: Path, model: Path, out: Path, *, loads_model: bool) -> None:
    """Writes a recipe that extends another and takes its base policy from a directory.

    `policy.prompt_format`, where a policy has it, is chat if the model has a chat template.

    Args:
      model: A directory under data/, with or without `data/`.
      loads_model: Whether the model is also loaded and stored as a run does it.

    Raises:
      ParameterError: If `out` exists, the directory is not under data/, or the model or the
        parameters are refused.
      UnsoundError: If `grpo check` finds errors.
    """
    if out.exists():
        raise ParameterError(f"{out}: exists; name another file with --out")
    if out.name == PARAMS.name:
        raise ParameterError(f"{out}: must be a recipe, which is resolved into it; use --out")
    policy, path = read_params(recipe).policy.model_dump(mode="json"), _below_data(model)
    own: dict[str, Any] = {"source": "directory", "path": path}
    for key in reversed(_place_of_source(policy)):
        own = {key: own}
    if "prompt_format" in policy:
        own["prompt_format"] = "chat" if _has_chat_template(DATA / path) else "plain"
    with atomic_path(out) as temporary:  # beside `out`, so that `extends` leads to the recipe
        temporary.write_text(_recipe_text(recipe, out, own), encoding="utf-8")
        try:
            _require_sound(temporary, loads_model)
        except (ParameterError, UnsoundError) as error:
            raise type(error)(str(error).replace(str(temporary), str(out))) from None


def _below_data(model: Path) -> str:
    """Returns the path of a model directory as policy.base.path writes it."""
    for path in (model, DATA / model):
        if path.is_dir() and Path(os.path.abspath(path)).is_relative_to(DATA.absolute()):
            return os.path.relpath(path, DATA)
    if not model.is_dir():
        raise ParameterError(f"{model}: must be a directory under {DATA}/, there is none")
    raise ParameterError(
        f"{model}: must lie under {DATA}/; run ln -s {model.absolute()} {DATA}/{model.name}, and "
        f"name it with --model {DATA}/{model.name}"
    )


def _place_of_source(policy: Mapping[str, Any]) -> list[str]:
    """Returns the path of the first section that names the source of weights: base, or a part."""
    place, section = [BASE], policy[BASE]
    while "source" not in section:
        name = next(key for key, value in section.items() if isinstance(value, dict))
        place, section = [*place, name], section[name]
    return place


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in CHAT_TEMPLATES):
        return True
    settings = read_json(directory / TOKENIZER) if (directory / TOKENIZER).is_file() else None
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _recipe_text(recipe: Path, out: Path, policy: Mapping[str, Any]) -> str:
    near, schema = (os.path.relpath(each, out.parent) for each in (recipe, RECIPE_SCHEMA))
    return (
        f"{EDITOR}{schema}\n"
        f"# {recipe} with another base model. To run it: make demo RECIPE={out}\n"
        f"{dump_yaml({EXTENDS: near, 'policy': dict(policy)}, compact=True)}"
    )


def _require_sound(file: Path, loads_model: bool) -> None:
    """Raises a GrpoError unless a file passes `grpo check`, and a run can load its base policy."""
    with naming(file):
        params = read_params(file)
        errors = [each for each in findings(params) if each.severity is Severity.ERROR]
        if errors:
            raise UnsoundError(f"{file}: {errors[0]}")
        if loads_model:
            _require_loadable(params)


def _require_loadable(params: Parameters) -> None:
    """Raises a GrpoError unless the base policy can be made, stored and loaded, on the CPU."""
    here = params.machine.model_copy(update={"device": "cpu", "compile": False})
    params = params.model_copy(update={"machine": here})
    prepare_machine(here)
    base = build_base(params, DATA)
    draws = draws_of_evaluation(params)["sampled"]
    WORK.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        stored = Path(folder) / "base"
        base.save(stored)
        load_policy(params, base=stored, directory=stored, draws=draws)
