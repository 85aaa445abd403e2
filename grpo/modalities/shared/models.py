"""Models of transformers, fresh or from a source, and LoRA adapters."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grpo.errors import MissingExtraError, ParameterError, refused_by_library
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import find_wrong_weights
from grpo.runtime.sources import Source, find_local_source, find_source, refusal
from grpo.schema import PARAMS, DirectoryBase, HubBase, S3Base

PEFT_CONFIG = "adapter_config.json"


def make_fresh_model(
    architecture: str,
    config: Mapping[str, Any],
    known: Mapping[str, Any],
    *,
    ending: str,
    what: str,
    parameter: str,
) -> PreTrainedModel:
    """Returns a model of a transformers class with its default initialization.

    Args:
      known: Configuration that the caller determines; `config` must not repeat its keys.
      ending: Required ending of the class name.
      what: Description of such a class with an example, for messages.
      parameter: Path of the parameters `architecture` and `config`, for messages.

    Raises:
      ParameterError: If there is no such class, or it refuses its configuration.
    """
    model_class: Any = getattr(transformers, architecture, None)
    # An AutoModel has no configuration of its own.
    if not architecture.endswith(ending) or getattr(model_class, "config_class", None) is None:
        raise ParameterError(
            f"{PARAMS}: {parameter}.architecture must be {what}, got {architecture!r}"
        )
    with refused_by_library(
        lambda why: ParameterError(f"{PARAMS}: {parameter}.config is refused: {why}")
    ):
        require_known_keys(model_class.config_class, config, parameter=f"{parameter}.config")
        model: PreTrainedModel = model_class(model_class.config_class(**config, **known))
    return model


def require_known_keys(kind: Any, config: Mapping[str, Any], *, parameter: str) -> None:
    """Raises ParameterError for a key that a configuration class ignores.

    Args:
      kind: A configuration class of transformers; such classes accept unknown keys.
      parameter: Path of the parameter `config`, for messages.
    """
    default = kind()
    rotary = getattr(default, "rope_parameters", None)
    known = {
        *(each.name for each in fields(kind)),
        *default.to_dict(),
        *default.attribute_map,
        *([*rotary, "rope_scaling"] if rotary else []),  # older spellings, still accepted
    }
    unknown = [key for key in config if key not in known]
    if unknown:
        near = get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.0)
        raise ParameterError(
            f"{PARAMS}: {parameter}.{unknown[0]} is unknown to {kind.__name__}; the nearest known "
            f"key is {near[0]}"
        )


def read_tokenizer(
    imported: DirectoryBase | HubBase | S3Base, data: Path, *, parameter: str
) -> Any:
    """Returns the tokenizer at a source.

    Raises:
      ParameterError: If the source does not exist or cannot be loaded.
      StorageError: If it cannot be downloaded.
    """
    return _read(AutoTokenizer, find_source(imported, data, parameter=parameter))


def read_model(
    auto_class: Any,
    imported: DirectoryBase | HubBase | S3Base,
    data: Path,
    *,
    parameter: str,
    **options: Any,
) -> Any:
    """Returns the model that an Auto class of transformers finds at a source.

    Checks that the stored weights are exactly those of the model, because transformers initializes
    missing ones at random. For AutoModel, additional weights of a head are allowed.

    Raises:
      ParameterError: If the source does not exist, cannot be loaded or holds another model.
      StorageError: If it cannot be downloaded.
    """
    source = find_source(imported, data, parameter=parameter)
    if source.is_local and (Path(source.name) / PEFT_CONFIG).exists():
        raise refusal(
            source, f"it has {PEFT_CONFIG}: merge the adapter into its base model and save that"
        )
    model, found = _read(
        auto_class,
        source,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
        **options,
    )
    own = {name for name, _ in model.named_children()}
    prefix = f"{model.base_model_prefix}."

    def is_of_head(key: str) -> bool:
        return auto_class is AutoModel and key.removeprefix(prefix).split(".")[0] not in own

    if wrong := find_wrong_weights(found, is_left_out=is_of_head):
        raise refusal(
            source,
            f"its weights are not those of {type(model).__name__} with its config.json: {wrong}",
        )
    return model


def shape_model(
    auto_class: Any, imported: DirectoryBase | HubBase | S3Base, data: Path, *, parameter: str
) -> Any:
    """Returns the model that an Auto class makes of a source's configuration, without its weights.

    Call it on the meta device. Nothing is downloaded.

    Raises:
      ParameterError: If the configuration is not on this machine, or cannot be loaded.
    """
    source = find_local_source(imported, data, parameter=parameter)
    with refused_by_library(lambda why: refusal(source, why)):
        config = AutoConfig.from_pretrained(
            source.name,
            revision=source.revision,
            local_files_only=True,
            trust_remote_code=False,
        )
        return auto_class.from_config(config, trust_remote_code=False).eval()


def require_embedded(model: PreTrainedModel, tokenizer: Any, *, parameter: str) -> None:
    """Raises ParameterError unless the model embeds every token of the tokenizer."""
    rows, tokens = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if tokens > rows:
        raise ParameterError(
            f"{PARAMS}: {parameter}: the tokenizer has {tokens} tokens, the model embeds {rows}; "
            "take the tokenizer that the model was trained with, or resize its embeddings"
        )


def _read(auto_class: Any, source: Source, **options: Any) -> Any:
    where = {
        "revision": source.revision,
        "local_files_only": source.is_local,
        "trust_remote_code": False,  # None would prompt interactively
    }
    with refused_by_library(lambda why: refusal(source, why)):
        return auto_class.from_pretrained(source.name, **where, **options)


def add_lora(model: Any, lora: Lora, *, seed: int, adapted: Any | None = None) -> None:
    """Adds fresh adapters to a model.

    Trainable are the adapters and all modules outside of `adapted`.

    Args:
      adapted: The submodule that gets adapters, whose own weights are frozen; None: the model.

    Raises:
      MissingExtraError: If peft is not installed.
      ParameterError: If a target is not a layer of the model.
    """
    try:
        # Imported here: peft takes four seconds, and most runs train all weights.
        from peft import LoraConfig
    except ImportError:
        raise MissingExtraError(
            f"{PARAMS}: policy.lora needs peft; run pip install -e '.[lora]'"
        ) from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    part = model if adapted is None else adapted
    _require_targets(part, lora.target_modules)
    torch.manual_seed(seed)
    part.add_adapter(config)
    model.eval()


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns W + scale * B A of layers with adapters, and the other weights as they are, by name.

    The names are those of the model without adapters, which is not changed.
    """
    merged = dict[str, Tensor]()
    for name, weight in model.named_parameters():
        if weight.requires_grad:  # of an adapter
            continue
        layer, is_adapted, parameter = name.rpartition(".base_layer.")
        if parameter == "weight":
            adapted: Any = model.get_submodule(layer)
            (adapter,) = adapted.active_adapters
            merged[f"{layer}.weight"] = weight + adapted.get_delta_weight(adapter)
        else:
            merged[f"{layer}.{parameter}" if is_adapted else name] = weight
    return merged


def _require_targets(model: Any, targets: list[str]) -> None:
    """Raises ParameterError for a target that matches no layer, or one with another's weight.

    peft ignores some of the former, and warns of the latter: merged into the shared weight, the
    adapter of one layer would change both.
    """
    adaptable = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, adaptable)}
    names, of_weight = list(layers), dict[int, str]()
    shared = dict[str, str]()
    for name, layer in layers.items():
        other = of_weight.setdefault(id(layer.weight), name)
        if other != name:
            shared |= {name: other, other: name}
    for target in targets:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        for name in shared.keys() & {*matches}:
            raise ParameterError(
                f"{PARAMS}: policy.lora.target_modules must name layers with a weight of their "
                f"own, got {target!r}: {name} has that of {shared[name]}; remove it"
            )
        if not matches:
            endings = sorted({name.rpartition(".")[2] for name in names})
            near = get_close_matches(target.rpartition(".")[2], endings, n=1, cutoff=0.0)
            raise ParameterError(
                f"{PARAMS}: policy.lora.target_modules must name layers that can be adapted, got "
                f"{target!r}; the nearest name is {near[0] if near else 'none'}"
            )
