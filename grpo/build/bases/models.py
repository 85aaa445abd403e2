"""Models of transformers: with fresh weights, or read from a source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from grpo.build.sources import find_source, refusal
from grpo.errors import ParameterError
from grpo.params.parameters import PARAMS
from grpo.params.policy import DirectoryBase, HubBase, S3Base
from grpo.policies.storage import LOADING_ERRORS


def make_fresh_model(
    architecture: str,
    config: Mapping[str, Any],
    known: Mapping[str, Any],
    *,
    ending: str,
    what: str,
    parameter: str,
) -> PreTrainedModel:
    """Returns a model of a transformers class with weights as its class draws them.

    Args:
      known: What is said elsewhere: a configuration that says it as well is refused.
      ending: Of the class's name.
      what: A class with such a name is, with an example, for messages.
      parameter: Which holds `architecture` and `config`, for messages.

    Raises:
      ParameterError: If there is no such class, or it refuses its configuration.
    """
    model_class: Any = getattr(transformers, architecture, None)
    if not architecture.endswith(ending) or model_class is None:
        raise ParameterError(
            f"{PARAMS}: {parameter}.architecture must be {what}, got {architecture!r}"
        )
    try:
        model: PreTrainedModel = model_class(model_class.config_class(**config, **known))
    except (TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ParameterError(f"{PARAMS}: {parameter}.config is refused: {reason}") from None
    return model


def read_pretrained(
    auto_class: Any,
    imported: DirectoryBase | HubBase | S3Base,
    data: Path,
    *,
    parameter: str,
    **options: Any,
) -> Any:
    """Returns what an Auto class of transformers finds at a source: a model, or its tokenizer.

    Raises:
      ParameterError: If the source does not exist or cannot be loaded.
      StorageError: If it cannot be downloaded.
    """
    source = find_source(imported, data, parameter=parameter)
    where = {
        "revision": source.revision,
        "local_files_only": source.is_local,
        "trust_remote_code": False,  # without a word, a person at a terminal would be asked
    }
    try:
        return auto_class.from_pretrained(source.name, **where, **options)
    except (OSError, ValueError, KeyError, RuntimeError, *LOADING_ERRORS) as error:
        raise refusal(source, error) from None
