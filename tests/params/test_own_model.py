"""`grpo init`: a recipe for a model directory of one's own, which a run can load."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from grpo.errors import ArtifactError, ParameterError
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.wiring.own_model import write_recipe
from tests.modalities.tiny import tiny_policy

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
MODEL, OUT = Path("data/tiny"), Path("own.yaml")
TEMPLATE = "{% for each in messages %}<{{ each['content'] }}>{% endfor %}"
TEXTS = ("smoke", "reasoning-short", "reasoning-qwen", "reasoning-smollm2")


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the recipes and a tiny model in data/tiny."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(RECIPES)
    policy = tiny_policy()
    policy.model.save_pretrained(MODEL)
    policy.tokenizer.save_pretrained(MODEL)


def write(recipe: str, model: Path = MODEL, *, loads_model: bool = False) -> None:
    write_recipe(Path("recipes") / f"{recipe}.yaml", model, OUT, loads_model=loads_model)


@pytest.mark.parametrize("recipe", TEXTS)
def test_only_the_base_model_differs_from_the_recipe(recipe: str):
    write(recipe)
    own, other = read_params(OUT), read_params(RECIPES / f"{recipe}.yaml")
    assert own.policy.base.model_dump() == {"source": "directory", "path": "tiny"}
    assert own.policy.warmup is None
    changes = {"base": own.policy.base, "prompt_format": "plain"}
    assert own.policy == other.policy.model_copy(update=changes)
    assert own.model_copy(update={"policy": other.policy}) == other


def test_a_backbone_of_robots_keeps_the_rest_of_its_base():
    write("manipulation")
    base = read_content(OUT)["policy"]["base"]
    imported = {"source": "directory", "path": "tiny"}
    assert base == {**read_content(RECIPES / "manipulation.yaml")["policy"]["base"],
                    "backbone": imported}  # fmt: skip


def test_a_chat_template_makes_prompts_messages():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(MODEL)
    write("smoke", loads_model=True)
    assert read_params(OUT).policy.prompt_format == "chat"


@pytest.mark.long
def test_the_command_writes_what_grpo_check_accepts_and_overwrites_nothing():
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "grpo", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    words = ("init", "--recipe", "smoke", "--model", "data/tiny")
    done = run(*words)
    assert (done.returncode, done.stdout) == (0, "tiny.yaml\n")
    assert run("check", "tiny.yaml").returncode == 0
    assert run("params", "tiny.yaml", "--write").returncode == 0
    written = Path("tiny.yaml").read_bytes()
    again = run(*words)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "tiny.yaml: exists; name another file with --out\n"
    assert Path("tiny.yaml").read_bytes() == written


def refused(message: str, recipe: str = "smoke", model: Path = MODEL) -> None:
    with pytest.raises((ParameterError, ArtifactError), match=message) as raised:
        write(recipe, model, loads_model=True)
    assert "\n" not in str(raised.value)
    assert not OUT.exists()


def test_a_directory_outside_data_is_refused_and_may_be_linked(tmp_path: Path):
    Path("data/tiny").rename("other")
    refused(
        r"^other: must lie under data/; run ln -s \S+/other data/other, and", model=Path("other")
    )
    refused("^data/tiny: must be a directory under data/, there is none")
    Path("data/other").symlink_to(tmp_path / "other")
    write("smoke", Path("data/other"), loads_model=True)
    assert read_params(OUT).policy.base.path == "other"


def test_a_directory_that_a_run_would_refuse_is_refused_by_name():
    (MODEL / "adapter_config.json").write_text("{}")
    refused(r"^own.yaml: policy.base 'data/tiny' cannot be loaded: it has adapter_config.json")
    (MODEL / "adapter_config.json").unlink()
    (MODEL / "model.safetensors").write_bytes(b"")
    refused("^own.yaml: policy.base 'data/tiny' cannot be loaded: ")


def test_adapters_on_layers_that_the_model_lacks_are_refused():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "n_inner": 32}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)
    GPT2LMHeadModel(config).save_pretrained(MODEL)
    refused("^own.yaml: policy.lora.target_modules must name layers", recipe="reasoning-smollm2")
    write("smoke", loads_model=True)
