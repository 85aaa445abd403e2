"""Low-rank adapters on a model of transformers or diffusers, by peft.

An extra: pip install -e '.[lora]'.
"""

from pathlib import Path
from typing import Any

import torch

from grpo.errors import MissingExtraError
from grpo.params.policy import Lora
from grpo.policies.storage import ADAPTER, read_trainable


def load_lora(
    model: Any, lora: Lora, directory: Path, *, seed: int, adapted: Any | None = None
) -> Any:
    """Returns the model with the adapters of a policy directory; fresh ones if it has none.

    Adapters and what is not `adapted` are all that trains.

    Args:
      adapted: The part of the model that gets adapters; None: the model.

    Raises:
      ArtifactError: If the adapters are broken or of another model.
      MissingExtraError: If peft is not installed.
    """
    try:
        # Imported here: peft takes four seconds, and most runs train all weights.
        from peft import LoraConfig
    except ImportError:
        raise MissingExtraError(
            "params.yaml: policy.lora needs peft; run pip install -e '.[lora]'"
        ) from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
    )
    torch.manual_seed(seed)
    (model if adapted is None else adapted).add_adapter(config)
    model.eval()
    if (directory / ADAPTER).exists():
        read_trainable(directory, model, optimizer=None)
    return model
