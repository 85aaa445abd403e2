"""Imported models: a model is what its files say, or it is refused in one line."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.models import (
    add_lora,
    make_fresh_model,
    read_model,
    require_known_keys,
)
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.bases import make_base
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, require_chat_template
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.chats import write_chat
from grpo.schema import DirectoryBase

ROOT = Path(__file__).parents[2]
VOCABULARY = len(make_byte_tokenizer())
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
Change = Callable[[Path], object]


def save(directory: Path, model: Any, tokenizer: Any = None) -> None:
    model.save_pretrained(directory)
    (tokenizer or make_byte_tokenizer()).save_pretrained(directory)


def params_of(tmp_path: Path) -> Parameters:
    content = yaml.safe_load((ROOT / "recipes" / "smoke.yaml").read_text())
    content["policy"]["base"] = {"source": "directory", "path": "model"}
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_params(file)


def make(tmp_path: Path) -> Any:
    """Returns the base model of data/model and its tokenizer, as the stage base imports them."""
    return make_base(params_of(tmp_path), tmp_path / "data")


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    save_file(change(weights) or weights, file, metadata={"format": "pt"})


def edit_json(directory: Path, name: str, **values: Any) -> None:
    file = directory / name
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))


def rename(prefix: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: {f"{prefix}{name}": each for name, each in weights.items()}


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda weights: {key: each for key, each in weights.items() if key != name}


def without_end(directory: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.eos_token = None
    LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        edit_json(directory, name, eos_token_id=None)


def beyond_the_embedding(directory: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens(["<more>", "<and more>"])
    save(directory, LlamaForCausalLM(LLAMA), tokenizer)


def of_another_shape(name: str, content: str) -> Change:
    """Returns a change to a file that is JSON, and not that of a model."""
    return lambda d: (save(d, LlamaForCausalLM(LLAMA)), (d / name).write_text(content))


BERT = BertConfig(**SIZES)
HEADLESS = "model.layers.1.mlp.up_proj.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "a tensor is missing": (
        lambda d: (save(d, LlamaForCausalLM(LLAMA)), edit_weights(d, drop(HEADLESS))),
        rf"1 missing, the first is {HEADLESS}",
    ),
    "names of a wrapper": (
        lambda d: (save(d, LlamaForCausalLM(LLAMA)), edit_weights(d, rename("_fsdp."))),
        r"missing, the first is lm_head.weight",
    ),
    "one layer too few": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_json(d, "config.json", num_hidden_layers=1),
        ),
        r"unexpected, the first is model.layers.1",
    ),
    "one layer too many": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_json(d, "config.json", num_hidden_layers=3),
        ),
        r"missing, the first is model.layers.2",
    ),
    "another width": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_json(d, "config.json", intermediate_size=64),
        ),
        r"6 mismatched, the first is .*down_proj.weight', .*\[16, 32\]\), .*\[16, 64\]\)",
    ),
    "a tensor of another shape": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_weights(d, lambda w: {**w, HEADLESS: w[HEADLESS][:-1].contiguous()}),
        ),
        rf"1 mismatched, the first is .*{HEADLESS}', .*\[31, 16\]\), .*\[32, 16\]\)",
    ),
    "a library that is not here": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_json(
                d,
                "config.json",
                quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
            ),
        ),
        r"cannot be loaded: ImportError: .*bitsandbytes",
    ),
    **{
        f"{content} for {name}": (of_another_shape(name, content), "cannot be loaded: ")
        for name, content in (
            ("config.json", "null"),
            ("generation_config.json", "[]"),
            ("tokenizer.json", "null"),
            ("tokenizer.json", "[1]"),
            ("tokenizer.json", '{"added_tokens": [], "model": []}'),
            ("tokenizer_config.json", "null"),
        )
    },
    "no head": (lambda d: save(d, LlamaModel(LLAMA)), r"1 missing, the first is lm_head.weight"),
    "a reward model": (
        lambda d: save(d, LlamaForSequenceClassification(LLAMA)),
        r"missing, the first is lm_head.weight",
    ),
    "a reward model with tied weights": (
        lambda d: save(
            d,
            LlamaForSequenceClassification(
                LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
            ),
        ),
        r"1 unexpected, the first is score.weight",
    ),
    "an encoder": (lambda d: save(d, BertModel(BERT)), r"missing, the first is cls"),
    "a masked model": (
        lambda d: save(d, BertForMaskedLM(BERT)),
        r"must be a causal language model: BertLMHeadModel attends to later tokens",
    ),
    "a NaN": (
        lambda d: (
            save(d, LlamaForCausalLM(LLAMA)),
            edit_weights(d, lambda w: {**w, HEADLESS: w[HEADLESS] * torch.nan}),
        ),
        r"must predict finite logits",
    ),
    **{
        f"end token {value}": (
            lambda d, value=value: (
                without_end(d),
                edit_json(d, "generation_config.json", eos_token_id=value),
            ),
            message,
        )
        for value, message in (
            (99999, r"got eos_token_id 99999 in generation_config.json for 259 tokens"),
            (-1, r"got eos_token_id -1 in generation_config.json for 259 tokens"),
            ("2", r"eos_token_id of generation_config.json must be the number .*, got '2'"),
            ([[1]], r"eos_token_id of generation_config.json must be the number .* \[\[1\]\]"),
        )
    },
    "no end token": (without_end, r"must have an end token, without which no rollout"),
    "a larger vocabulary": (beyond_the_embedding, r"has 261 tokens, the model embeds 259"),
    "an adapter": (
        lambda d: (d.mkdir(), (d / "adapter_config.json").write_text('{"peft_type": "LORA"}')),
        r"merge the adapter into its base model",
    ),
    "nothing": (lambda d: d.mkdir(), r"cannot be loaded"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_whole_causal_model_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "data").mkdir()
    spoil, message = WRONG[name]
    spoil(tmp_path / "data" / "model")
    with pytest.raises((ParameterError, ArtifactError), match=message) as error:
        make(tmp_path)
    assert "policy.base" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LLAMA),
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)),
    ],
)
def test_an_imported_model_is_that_of_its_files(tmp_path: Path, model: Any):
    """Tied and untied heads; twice the same weights, bit by bit."""
    save(tmp_path / "data" / "model", model)
    first, second = (make(tmp_path)[0].state_dict() for _ in range(2))
    for name, weight in model.state_dict().items():
        assert torch.equal(first[name], weight), name
        assert torch.equal(second[name], weight), name


def test_a_backbone_may_leave_out_a_head_and_no_layer(tmp_path: Path):
    save(tmp_path / "model", LlamaForCausalLM(LLAMA))
    imported = DirectoryBase(source="directory", path="model")
    backbone = read_model(AutoModel, imported, tmp_path, parameter="policy.base.backbone")
    assert len(backbone.layers) == 2
    edit_json(tmp_path / "model", "config.json", num_hidden_layers=1)
    with pytest.raises(ParameterError, match=r"unexpected, the first is model\.layers\.1"):
        read_model(AutoModel, imported, tmp_path, parameter="policy.base.backbone")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num_hidden_layer", "num_hidden_layers"),
        ("n_layers", "num_hidden_layers|rope|n_layer"),
        ("hiddensize", "hidden_size"),
    ],
)
def test_a_key_that_a_configuration_never_looks_at_is_refused(key: str, nearest: str):
    config = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    asked: dict[str, Any] = {"ending": "ForCausalLM", "what": "one", "parameter": "policy.base"}
    known = {"vocab_size": VOCABULARY}
    make_fresh_model("LlamaForCausalLM", {**config, "rope_theta": 5000.0}, known, **asked)
    with pytest.raises(ParameterError) as error:
        make_fresh_model("LlamaForCausalLM", {**config, key: 2}, known, **asked)
    unknown = f"params.yaml: policy.base.config.{key} is unknown to LlamaConfig"
    assert str(error.value).startswith(unknown)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("AutoModelForCausalLM", {}, "policy.base.architecture must be one, got 'AutoModelForC"),
        ("LlamaForCausalLM", {"hidden_act": "sillu"}, "config is refused: KeyError: 'sillu'"),
        ("LlamaForCausalLM", {"id2label": "x"}, "config is refused: AttributeError: 'str' object"),
    ],
)
def test_a_fresh_model_that_its_library_refuses_is_refused_in_one_line(
    architecture: str, config: dict[str, Any], message: str
):
    asked: dict[str, Any] = {"ending": "ForCausalLM", "what": "one", "parameter": "policy.base"}
    with pytest.raises(ParameterError, match=message):
        make_fresh_model(architecture, {**SIZES, **config}, {}, **asked)


def test_the_keys_of_every_recipe_are_known():
    """What a recipe says of a fresh model reaches it."""
    for recipe in [ROOT / "params.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]:
        base = read_params(recipe).policy.base
        if getattr(base, "source", None) == "scratch" and hasattr(base, "config"):
            parts = {
                name: getattr(base, name)
                for name in ("vision_config", "text_config")
                if hasattr(base, name)
            }
            with torch.device("meta"):  # without weights: some of them are of billions
                model = make_fresh_model(
                    base.architecture,
                    base.config,
                    {"vocab_size": VOCABULARY, **parts},
                    ending="",
                    what="one",
                    parameter="policy.base",
                )
            for name, config in parts.items():
                require_known_keys(type(getattr(model.config, name)), config, parameter=name)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "needs a chat template"),
        ("{{ raise_exception('no') }}", "needs a chat template that renders"),
        ("{% for m in messages %}{{ m.content", "needs a chat template that renders"),
        ("{{ messages.nothing.at.all }}", "needs a chat template that renders"),
        ("{{ 1 / 0 }}", "needs a chat template that renders .*: ZeroDivisionError"),
        ("{% for i in range(10**9) %}.{% endfor %}", "needs .* renders .*: OverflowError"),
        ("<user><assistant>", "must render the user message, got '<user><assistant>'"),
    ],
)
def test_a_chat_template_must_render_what_the_user_says(template: str | None, message: str):
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ParameterError, match=message) as error:
        require_chat_template(tokenizer)
    assert "\n" not in str(error.value)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    require_chat_template(tokenizer)


def test_a_chat_is_encoded_with_its_system_message_or_refused():
    tokenizer = make_byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2}))
    decoding = Decoding(temperature=1.0, max_steps=1)
    prompt = write_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )

    def encoded(template: str) -> str:
        tokenizer.chat_template = template
        policy = TokenPolicy(model, tokenizer, decoding=decoding, uses_chat_template=True)
        tokens, _ = policy.encode([prompt])
        return str(tokenizer.decode(tokens[0]))

    every = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert encoded(every) == "<system>Be brief.<user>Hi"
    last = "{{ messages[-1].content }}"
    with pytest.raises(ParameterError, match="must render the system message, got 'Hi'"):
        encoded(last)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ParameterError, match=r"renders messages of system, user: .*no system"):
        encoded(refuses + every)


@pytest.mark.parametrize(
    "model",
    [
        GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        ),
        LlamaForCausalLM(
            LlamaConfig(**{**SIZES, "num_key_value_heads": 2}, max_position_embeddings=16)
        ),
    ],
)
def test_a_rollout_needs_no_more_positions_than_the_model_has(model: Any):
    def policy(max_steps: int) -> TokenPolicy:
        decoding = Decoding(temperature=1.0, max_steps=max_steps)
        return TokenPolicy(
            model.eval(), make_byte_tokenizer(), decoding=decoding, uses_chat_template=False
        )

    generator = torch.Generator().manual_seed(0)
    policy(10).sample(["12345"], group_sizes=[2], generator=generator)  # 6 tokens with the mark
    message = r"policy.max_steps: a prompt of 6 tokens and 11 steps need 17 positions, .* has 16"
    with pytest.raises(ParameterError, match=message):
        policy(11).sample(["12345"], group_sizes=[2], generator=generator)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_no_target_of_lora_shares_its_weight(target: str):
    tied = LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True}))
    lora = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", target])
    with pytest.raises(ParameterError, match=rf"got '{target}': \S+ has that of \S+; remove it"):
        add_lora(tied, lora, seed=0)


def test_every_target_of_lora_is_a_layer():
    lora = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_prj"])
    with pytest.raises(
        ParameterError,
        match=r"must name layers that can be adapted, got 'v_prj'; the nearest name is v_proj",
    ):
        add_lora(LlamaForCausalLM(LLAMA), lora, seed=0)
