"""Token policies from their directories."""

from pathlib import Path

from torch import nn

from grpo.build.machine import DTYPES
from grpo.params.parameters import Parameters
from grpo.policies.lora import load_lora
from grpo.policies.routing import require_routers
from grpo.policies.storage import load_base
from grpo.policies.tokens import Decoding, TokenPolicy
from grpo.ranks import num_ranks
from grpo.seeds import derive_seed


def load_token_policy(
    params: Parameters, *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Divided among the ranks, if there are several.

    Args:
      base: The base policy's directory; with LoRA, `directory` holds only the adapter.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.tokens
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base if settings.lora else directory, dtype)
    if settings.lora:
        seed = derive_seed(params.seed, "lora")
        model = load_lora(model, settings.lora, directory, seed=seed)
    if num_ranks() == 1:  # else it stays on the host until each rank takes its share
        nn.Module.to(model, params.machine.device)
    require_routers(model, settings.routing)
    policy = TokenPolicy(
        model,
        tokenizer,
        decoding=decoding,
        uses_chat_template=settings.prompt_format == "chat",
    )
    if params.machine.compile:
        policy.forward.compile("inductor")
    if num_ranks() > 1:
        policy.shard(params.machine.device)
    return policy


def load_vllm_sampler(params: Parameters, directory: Path, decoding: Decoding) -> TokenPolicy:
    """Returns the policy of a directory to draw rollouts from, by vLLM.

    Raises:
      ArtifactError: If a file is missing or broken.
      MissingExtraError: If it is not installed.
    """
    # Imported here: an extra, and seconds.
    from grpo.policies.vllm import VllmPolicy

    model, tokenizer = load_base(directory, DTYPES[params.machine.dtype])
    return VllmPolicy(
        model,
        tokenizer,
        directory=directory,
        decoding=decoding,
        uses_chat_template=params.tokens.prompt_format == "chat",
    )
