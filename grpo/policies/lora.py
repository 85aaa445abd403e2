"""Low-rank adapters on a causal LM, by peft: an extra (pip install -e '.[lora]')."""

import torch
from transformers import PreTrainedModel

from grpo.errors import MissingExtraError
from grpo.params import Lora


def add_lora(model: PreTrainedModel, lora: Lora, *, seed: int) -> PreTrainedModel:
    """Returns the model with fresh adapters as its only trainable parameters.

    Raises:
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
    model.add_adapter(config)
    model.eval()
    return model
