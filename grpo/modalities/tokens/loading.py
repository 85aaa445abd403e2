"""Token policies from their directories."""

from pathlib import Path
from typing import Any

from torch import nn

from grpo.errors import ParameterError, brief, refused_by_library
from grpo.modalities.modality import RunParams
from grpo.modalities.shared.directories import load_base, read_round, whole_policy
from grpo.modalities.shared.machine import DTYPES
from grpo.modalities.shared.models import add_lora
from grpo.modalities.shared.recomputation import recompute_blocks
from grpo.modalities.tokens.costs import TokenCostModel
from grpo.modalities.tokens.modality import TokenPolicyParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.modalities.tokens.routing import require_routers
from grpo.runtime.ranks import num_ranks
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS


def load_token_policy(
    params: RunParams[TokenPolicyParams], *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Divided among the ranks, if there are several.

    Args:
      base: The base policy's directory; `directory`, if it is another, holds what changed.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    settings = params.policy
    dtype = DTYPES[params.machine.dtype]
    model, tokenizer = load_base(base, dtype)
    if settings.prompt_format == "chat":
        require_chat_template(tokenizer)
    if settings.lora:
        add_lora(model, settings.lora, seed=derive_seed(params.seed, "lora"))
    read_round(directory, base, model)
    if settings.recompute:
        recompute_blocks(model)
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


def require_chat_template(tokenizer: Any) -> None:
    """Raises ParameterError unless the tokenizer's chat template renders what the user says."""
    for said in ("first probe", "second probe"):
        with refused_by_library(
            lambda why: ParameterError(
                f"{PARAMS}: policy.prompt_format chat needs a chat template that renders a message "
                f"of a user: {why}; set plain or mend the template"
            )
        ):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True
            )
        if said not in text:
            raise ParameterError(
                f"{PARAMS}: policy.prompt_format chat: the tokenizer's chat template leaves out "
                f"what the user says, it renders {brief(repr(text))}; mend it or set plain"
            )


def load_vllm_sampler(
    params: RunParams[TokenPolicyParams], *, base: Path, directory: Path, decoding: Decoding
) -> TokenPolicy:
    """Returns the policy of a directory to draw rollouts from, by vLLM.

    Raises:
      ArtifactError: If a file is missing or broken.
      MissingExtraError: If it is not installed.
    """
    # Imported here: an extra, and seconds.
    from grpo.modalities.tokens.vllm import VllmPolicy

    model, tokenizer = load_base(base, DTYPES[params.machine.dtype])
    if params.policy.prompt_format == "chat":
        require_chat_template(tokenizer)
    with whole_policy(directory, base) as whole:
        return VllmPolicy(
            model,
            tokenizer,
            directory=whole,
            decoding=decoding,
            uses_chat_template=params.policy.prompt_format == "chat",
        )


def load_token_cost_model(params: RunParams[TokenPolicyParams], *, base: Path) -> TokenCostModel:
    """Returns what predicts the FLOPs of runs from the base policy in a directory.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    routing = params.policy.routing
    decoding = Decoding(temperature=1.0, max_steps=params.policy.max_steps)
    policy = load_token_policy(params, base=base, directory=base, decoding=decoding)

    def count_tokens(prompts: list[str]) -> list[int]:
        counts: list[int] = policy.encode(prompts)[1].sum(dim=1).tolist()
        return counts

    return TokenCostModel(
        forward=policy.flops.forward,
        training=policy.flops.training,
        shares_prompts=policy.forward.can_share and routing == "live",
        vocabulary=policy.model.config.vocab_size,
        always_scores_proximal=routing == "replay_proximal",
        count_tokens=count_tokens,
    )
