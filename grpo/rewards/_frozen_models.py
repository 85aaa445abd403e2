"""Models of judges, loaded in float32, in evaluation mode and without gradients; tokenizers."""

from typing import Any

import torch
from transformers import AutoTokenizer

from grpo.errors import refused_by_library
from grpo.runtime.sources import Source, refusal


def load_frozen(source: Source, model_class: Any) -> Any:
    """Returns a model of a class of `transformers`.

    bfloat16 has about three digits, too few to distinguish the rollouts of a group.

    Raises:
      ParameterError: If it cannot be loaded, or the weights are those of another class.
    """
    with refused_by_library(lambda why: refusal(source, why)):
        model, found = model_class.from_pretrained(
            source.name,
            revision=source.revision,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=source.is_local,
            output_loading_info=True,
        )
    if found["missing_keys"]:  # transformers initializes missing weights randomly
        wanted = model_class.__name__.removeprefix("AutoModelFor")
        lacks = min(found["missing_keys"])
        raise refusal(source, f"it has no {lacks}, which a {wanted} has")
    return model.eval().requires_grad_(False)


def load_tokenizer(source: Source) -> Any:
    """Returns the tokenizer of a model.

    Raises:
      ParameterError: If it cannot be loaded.
    """
    from_pretrained: Any = AutoTokenizer.from_pretrained
    with refused_by_library(lambda why: refusal(source, why)):
        return from_pretrained(
            source.name,
            revision=source.revision,
            trust_remote_code=False,
            local_files_only=source.is_local,
        )
