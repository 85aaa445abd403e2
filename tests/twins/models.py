"""Tiny models of the classes and configurations that recipes name: `configs/`, made small.

A configuration is what the hub's repository says, one file per model. The rule that makes it small:

* every width is divided by 16, or by the file's `width_divisor` (WIDTHS): head sizes, hidden sizes,
  channels of the autoencoder, groups of its norms, sections of rotary parts; the numbers of heads
  stay, so that grouped heads and rotary parts stay;
* every depth is divided by 8 (DEPTHS), and so is an index of a layer;
* the vocabulary is that of a small tokenizer of the same class, rounded up to a multiple of 64, for
  real embeddings have more rows than their tokenizers have tokens; special tokens keep their names;
* `tiny` of a component replaces what the rule cannot divide, such as narrow heads;
* everything else stays as it is.

Weights are random.
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from grpo.modalities.shared.tokenizers import BYTES

CONFIGS = Path(__file__).parent / "configs"
WIDTHS = {
    *("hidden_size", "intermediate_size", "projection_dim", "d_model", "d_ff", "d_kv"),
    *("attention_head_dim", "caption_projection_dim", "joint_attention_dim", "text_dim"),
    *("pooled_projection_dim", "ffn_dim", "freq_dim", "block_out_channels", "norm_num_groups"),
    *("base_dim", "encoder_ffn_dim", "decoder_ffn_dim", "out_hidden_size", "mrope_section"),
}
DEPTHS = {
    *("num_layers", "num_hidden_layers", "num_decoder_layers", "max_window_layers"),
    *("encoder_layers", "decoder_layers", "depth"),
}
INDICES = {"dual_attention_layers", "fullatt_block_indexes"}
TOKENS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("image_token_id", "video_token_id"),
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
}
WIDTH_DIVISOR, DEPTH_DIVISOR, VOCABULARY_MULTIPLE = 16, 8, 64
CHAT_TEMPLATE = (  # as those of Qwen2.5 and Qwen2.5-VL, without tools
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba "
    "Cloud. You are a helpful assistant.<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == "
    "'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = ["The answer is", " 1", " 2"]  # tokens of chat vocabularies, so that answers are short
IMAGE_MARKS = [
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
PRINTED = [*map(chr, range(33, 127))]


def config_of(source: dict[str, Any]) -> dict[str, Any]:
    """Returns the stored configurations of a source of a recipe.

    Raises:
      LookupError: If there are none, or of another revision: one line says what to add.
    """
    name, revision = source.get("id", source.get("path")), source.get("revision")
    for path in sorted(CONFIGS.glob("*.json")):
        content: dict[str, Any] = json.loads(path.read_text())
        if content["name"] == name:
            if content["revision"] != revision:
                raise LookupError(
                    f"{path}: is of revision {content['revision']}, the recipe names {revision}; "
                    "compare the configurations of both and write the new revision"
                )
            return content
    raise LookupError(
        f"{CONFIGS}: no file has the name {name!r}; add one with the model's config.json, as "
        "those that are there"
    )


def shrink(
    config: dict[str, Any], vocabulary: int | None = None, *, divisor: int = WIDTH_DIVISOR
) -> dict[str, Any]:
    """Returns a configuration made small by the rule above.

    Args:
      vocabulary: How many tokens the small tokenizer has; None: nothing is tokenized.
      divisor: Of widths.
    """
    return {key: _shrink_value(key, value, vocabulary, divisor) for key, value in config.items()}


def _shrink_value(key: str, value: Any, vocabulary: int | None, divisor: int) -> Any:
    if isinstance(value, dict):
        return shrink(value, vocabulary, divisor=divisor)
    if key in WIDTHS:
        return [each // divisor for each in value] if isinstance(value, list) else value // divisor
    if key in DEPTHS:
        return max(1, value // DEPTH_DIVISOR)
    if key in INDICES:
        return sorted({each // DEPTH_DIVISOR for each in value})
    if key == "vocab_size" and vocabulary is not None:
        return -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return value


def save_twin(content: dict[str, Any], directory: Path, *, seed: int = 0) -> Any:
    """Writes the tiny twin of a model, or of a pipeline, as `save_pretrained` does; returns it.

    Args:
      content: What `config_of` returns.
    """
    torch.manual_seed(seed)
    parts = _make_parts(content["components"], content.get("width_divisor", WIDTH_DIVISOR))
    if content["pipeline"] is not None:
        pipeline = getattr(diffusers, content["pipeline"])(**parts)
        pipeline.save_pretrained(directory, safe_serialization=True)
        return pipeline
    if isinstance(parts["model"], transformers.CLIPModel):
        processor = transformers.CLIPProcessor(
            image_processor=parts.pop("image_processor"), tokenizer=parts.pop("tokenizer")
        )
        parts = {"processor": processor, **parts}
    for part in parts.values():
        part.save_pretrained(directory)
    return parts["model"]


def _make_parts(components: dict[str, Any], divisor: int) -> dict[str, Any]:
    """Returns tokenizers, models and all else by name."""
    parts: dict[str, Any] = {}
    for name, each in components.items():
        if "vocabulary" in each:
            parts[name] = _make_tokenizer(each)
    for name, each in components.items():
        library, cls_name = each["class"].split(".")
        cls = getattr({"transformers": transformers, "diffusers": diffusers}[library], cls_name)
        tokenizer = parts.get(each.get("tokenizer", "tokenizer"))
        if name in parts:
            continue
        if not issubclass(cls, torch.nn.Module):
            parts[name] = cls(**each["config"])
            continue
        vocabulary = None if tokenizer is None else len(tokenizer)
        config = _replaced(
            shrink(each["config"], vocabulary, divisor=divisor), each.get("tiny", {})
        )
        numbers = _token_numbers(each.get("tokens", {}), tokenizer)
        config = {**config, **_renumbered(config, numbers)}
        model = (
            cls.from_config(config) if library == "diffusers" else cls(cls.config_class(**config))
        )
        if "generation" in each:
            generation = {**each["generation"], **_renumbered(each["generation"], numbers)}
            model.generation_config = transformers.GenerationConfig(**generation)
        parts[name] = model.eval()
    return parts


def _replaced(config: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    nested = {key: _replaced(config[key], each) for key, each in tiny.items() if type(each) is dict}
    return {**config, **tiny, **nested}


def _token_numbers(tokens: dict[str, str], tokenizer: Any) -> dict[int, int]:
    """Returns the small tokenizer's number of each special token by its number in the real one."""
    return {int(number): tokenizer.convert_tokens_to_ids(token) for number, token in tokens.items()}


def _renumbered(config: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    found = {}
    for key in TOKENS & config.keys():
        value = config[key]
        if isinstance(value, list):
            found[key] = [numbers[each] for each in value]
        elif value is not None:
            found[key] = numbers.get(value, value)
    return found


def _make_tokenizer(component: dict[str, Any]) -> Any:
    """Returns a tokenizer of the component's class that reads any text, with a small vocabulary."""
    cls = getattr(transformers, component["class"].split(".")[1])
    settings = component["config"]
    match component["vocabulary"]:
        case "bytes":
            return cls(vocab=_numbered(["<|endoftext|>", *BYTES]), merges=[], **settings)
        case "chat" | "image_chat" as kind:
            marks = ["<|im_start|>", "<|im_end|>", *(IMAGE_MARKS if kind == "image_chat" else [])]
            tokenizer = cls(vocab=_numbered(BYTES), merges=[], **settings)
            tokenizer.add_special_tokens({"additional_special_tokens": marks})
            tokenizer.add_tokens(ANSWER)
            tokenizer.chat_template = CHAT_TEMPLATE
            return tokenizer
        case "clip":  # the end token has the largest number, as in the real one
            ends = [f"{each}</w>" for each in BYTES]
            marks = ["<|startoftext|>", "<|endoftext|>"]
            return cls(vocab=_numbered([*BYTES, *ends, *marks]), merges=[], **settings)
        case "t5":
            scored = [(each, -5.0) for each in ["▁", *PRINTED]]
            return cls(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *scored], **settings)
        case "nllb":  # the class adds the tokens of languages
            return cls(
                vocab=_numbered(["<s>", "<pad>", "</s>", "<unk>", "▁", *PRINTED]),
                merges=[],
                **settings,
            )
        case "bert":
            marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            inner = [f"##{each}" for each in PRINTED]
            return cls(vocab=_numbered([*marks, *PRINTED, *inner]), **settings)
        case "xlm_roberta":
            marked = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0)]
            scored = [(each, -5.0) for each in ["▁", *PRINTED]]
            return cls(vocab=[*marked, *scored, ("<mask>", 0.0)], **settings)
    raise AssertionError(component["vocabulary"])


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
