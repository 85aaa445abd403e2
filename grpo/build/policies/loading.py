"""Policies from parameters, whatever their steps are, and their optimizer."""

from pathlib import Path
from typing import Any

from torch import nn

from grpo.artifacts.files import require_inert
from grpo.build.policies.draws import Draws
from grpo.build.policies.tokens import load_token_policy, load_vllm_sampler
from grpo.params.parameters import Parameters, Training
from grpo.params.policy import ActionChunkPolicyParams, TokenPolicyParams
from grpo.policies.base import Policy
from grpo.policies.chunk_decoding import ChunkDecoding
from grpo.policies.optimizer import PreciseAdamW
from grpo.policies.packed import Layout
from grpo.policies.scope import Judgement
from grpo.policies.storage import trainable
from grpo.policies.tokens import Decoding, token_layout


def load_policy(
    params: Parameters, *, base: Path, directory: Path, draws: Draws, sharing: int = 1
) -> Policy[Any]:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; `directory`, if it is another, holds what changed.
      sharing: Policies that share this host's processors.

    Raises:
      ArtifactError: If a file is missing or broken, or may run code.
    """
    require_inert(base)
    require_inert(directory)
    if isinstance(draws, Decoding):
        return load_token_policy(params, base=base, directory=directory, decoding=draws)
    # Imported here: other kinds' packages take seconds.
    if isinstance(draws, ChunkDecoding):
        from grpo.build.policies.action_chunks import load_chunk_policy

        return load_chunk_policy(
            params, base=base, directory=directory, decoding=draws, sharing=sharing
        )
    from grpo.build.policies.denoising import load_denoising_policy

    return load_denoising_policy(params, base=base, directory=directory, decoding=draws)


def load_sampler(
    params: Parameters,
    *,
    base: Path,
    directory: Path,
    draws: Draws,
    judge: Judgement | None = None,
    sharing: int = 1,
) -> Policy[Any]:
    """Returns the policy of a directory to draw rollouts from.

    Args:
      judge: Of what a denoising policy's scope looks at.
      sharing: Policies that share this host's processors.

    Raises:
      ArtifactError: If a file is missing or broken, or may run code.
      MissingExtraError: If vLLM is asked for and not installed.
    """
    if isinstance(draws, Decoding) and params.tokens.sampler == "vllm":
        require_inert(base)
        require_inert(directory)
        return load_vllm_sampler(params, base=base, directory=directory, decoding=draws)
    policy = load_policy(params, base=base, directory=directory, draws=draws, sharing=sharing)
    if judge is not None:
        denoising: Any = policy
        denoising.judge = judge
    return policy


def stored_layout(params: Parameters, base: Path) -> Layout:
    """Returns what is stored of rollouts, without loading the policy that draws them.

    Raises:
      ArtifactError: If the base policy is none of a known class.
    """
    if isinstance(params.policy, TokenPolicyParams):
        return token_layout(params.policy.routing)
    # Imported here, as above.
    if isinstance(params.policy, ActionChunkPolicyParams):
        from grpo.policies.chunk_trajectories import LAYOUT

        return LAYOUT
    from grpo.policies.pipelines import stored_condition_names
    from grpo.policies.trajectories import layout_of

    return layout_of(stored_condition_names(base))


def make_optimizer(model: nn.Module, training: Training) -> PreciseAdamW:
    """Returns AdamW over the trainable parameters."""
    return PreciseAdamW(
        trainable(model).values(),
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,  # one pass over each parameter, not one per operation
    )
