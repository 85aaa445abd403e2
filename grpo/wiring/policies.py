"""Policies from parameters, whatever their steps are, and their optimizer."""

from pathlib import Path
from typing import Any

from torch import nn

from grpo.modalities.action_chunks.decoding import ChunkDecoding
from grpo.modalities.base import Policy
from grpo.modalities.denoising.adascope import Judgement
from grpo.modalities.shared.directories import trainable
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.packed import Layout
from grpo.modalities.tokens.loading import load_token_policy, load_vllm_sampler
from grpo.modalities.tokens.policy import Decoding, token_layout
from grpo.params.parameters import Parameters, Training
from grpo.params.policy import ActionChunkPolicyParams, TokenPolicyParams
from grpo.runtime.artifacts.files import require_inert
from grpo.wiring.draws import Draws


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
        from grpo.modalities.action_chunks.loading import load_chunk_policy

        return load_chunk_policy(
            params, base=base, directory=directory, decoding=draws, sharing=sharing
        )
    from grpo.modalities.denoising.loading import load_denoising_policy

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
        from grpo.modalities.action_chunks.trajectories import LAYOUT

        return LAYOUT
    from grpo.modalities.denoising.pipelines import stored_condition_names
    from grpo.modalities.denoising.trajectories import layout_of

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
