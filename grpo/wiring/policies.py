"""Policies from parameters, whatever their steps are, and their optimizer."""

from pathlib import Path
from typing import Any

from torch import nn

from grpo.modalities.base import Policy
from grpo.modalities.modality import Judgement
from grpo.modalities.shared.directories import trainable
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.packed import Layout
from grpo.modalities.shared.warmup import BasePolicy
from grpo.params.parameters import Parameters, Training
from grpo.runtime.artifacts.files import require_inert


def build_base(params: Parameters, data: Path) -> BasePolicy:
    """Returns the base policy that the parameters describe.

    Raises:
      ParameterError: If the source does not exist or a class refuses its configuration.
      ArtifactError: If a model cannot be sampled.
      MissingExtraError: If a package is not installed.
    """
    return params.modality.make_base(params, data)


def load_policy(params: Parameters, *, base: Path, directory: Path, draws: Any) -> Policy[Any]:
    """Returns the policy of a directory, on the machine's device, without dropout.

    Args:
      base: The base policy's directory; `directory`, if it is another, holds what changed.
      draws: How it draws, and so what it scores.

    Raises:
      ArtifactError: If a file is missing or broken, or may run code.
    """
    require_inert(base)
    require_inert(directory)
    return params.modality.load_policy(params, base=base, directory=directory, draws=draws)


def load_sampler(
    params: Parameters,
    *,
    base: Path,
    directory: Path,
    draws: Any,
    judge: Judgement | None = None,
    sharing: int = 1,
) -> Policy[Any]:
    """Returns the policy of a directory to draw rollouts from.

    Args:
      judge: Of what is looked at on the way to a rollout.
      sharing: Policies that share this host's processors.

    Raises:
      ArtifactError: If a file is missing or broken, or may run code.
      MissingExtraError: If vLLM is asked for and not installed.
    """
    require_inert(base)
    require_inert(directory)
    return params.modality.load_sampler(
        params, base=base, directory=directory, draws=draws, sharing=sharing, judge=judge
    )


def stored_layout(params: Parameters, base: Path) -> Layout:
    """Returns what is stored of rollouts, without loading the policy that draws them.

    Raises:
      ArtifactError: If the base policy is none of a known class.
    """
    return params.modality.layout(params.policy, base)


def make_optimizer(model: nn.Module, training: Training) -> PreciseAdamW:
    """Returns AdamW over the trainable parameters."""
    return PreciseAdamW(
        trainable(model).values(),
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,  # one pass over each parameter, not one per operation
    )
