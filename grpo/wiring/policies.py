"""Construction of policies, of their sampling settings and of their optimizer from parameters."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from grpo.modalities.modality import Judgement
from grpo.modalities.policy import Policy
from grpo.modalities.shared.directories import trainable
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.packed import Layout
from grpo.params.parameters import BASE, Parameters, Training
from grpo.runtime.artifacts.files import require_inert

if TYPE_CHECKING:
    from grpo.modalities.shared.warmup import BasePolicy


def draws_of_round(params: Parameters, name: str, iteration: int = 0, *, level: int = 0) -> Any:
    """Returns the sampling settings of an iteration.

    Args:
      level: That of parameters which depend on earlier rewards.
    """
    arm = params.find_round(name).arm
    behind = _iterations_behind(params, name) + iteration
    sampling = params.find_arm(arm).sampling.sampled(level)
    return params.modality.round_draws(params.policy, sampling, iterations_behind=behind)


def scoring_draws_of_round(
    params: Parameters, name: str, iteration: int = 0, *, level: int = 0
) -> Any:
    """Returns the settings that define an iteration's log-probs: those of sampling (rule U25)."""
    arm = params.find_round(name).arm
    behind = _iterations_behind(params, name) + iteration
    sampling = params.find_arm(arm).sampling.scored(level)
    return params.modality.round_draws(params.policy, sampling, iterations_behind=behind)


def modes_of_round(params: Parameters, name: str) -> dict[str, Any]:
    """Returns the sampling settings of all iterations and levels of a round by `mode_name`."""
    arm = params.find_arm(params.find_round(name).arm)
    return {
        mode_name(index, level): draws_of_round(params, name, index, level=level)
        for index in range(arm.training.iterations_per_round)
        for level in range(arm.sampling.num_levels)
    }


def mode_name(iteration: int, level: int) -> str:
    """Returns the name under which a sampler knows the settings of an iteration."""
    return f"{iteration}.{level}"


def draws_of_arm(params: Parameters, arm: str) -> Any:
    """Returns the sampling settings of an arm's first iteration."""
    sampling = params.find_arm(arm).sampling.sampled(0)
    return params.modality.round_draws(params.policy, sampling, iterations_behind=0)


def draws_of_profile(params: Parameters) -> Any:
    """Returns the sampling settings of the profile: those of evaluation, without greedy."""
    return params.modality.profile_draws(params.policy, params.evaluation.sampling)


def draws_of_evaluation(params: Parameters) -> dict[str, Any]:
    """Returns the sampling settings of evaluation: random, and greedy if the policy supports it."""
    return params.modality.evaluation_draws(params.policy, params.evaluation.sampling)


def _iterations_behind(params: Parameters, name: str) -> int:
    """Returns the number of iterations before a round in the rounds of the same arm."""
    arm, behind = params.rounds[name].arm, 0
    while (name := params.rounds[name].start) != BASE and params.rounds[name].arm == arm:
        behind += params.arms[arm].training.iterations_per_round
    return behind


def build_base(params: Parameters, data: Path) -> "BasePolicy":
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
      base: The base policy's directory; a different `directory` holds only changed weights.
      draws: Sampling settings, which also define log-probs.

    Raises:
      ArtifactError: If a file is missing or invalid, or may run code.
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
    policies_per_host: int = 1,
) -> Policy[Any]:
    """Returns the policy of a directory for sampling.

    Args:
      judge: Judges intermediate samples, if sampling depends on their rewards.
      policies_per_host: Number of policies that share this host's processors.

    Raises:
      ArtifactError: If a file is missing or invalid, or may run code.
      MissingExtraError: If the sampler is vLLM and vLLM is not installed.
    """
    require_inert(base)
    require_inert(directory)
    return params.modality.load_sampler(
        params,
        base=base,
        directory=directory,
        draws=draws,
        policies_per_host=policies_per_host,
        judge=judge,
    )


def stored_layout(params: Parameters, base: Path) -> Layout:
    """Returns the layout of stored rollouts without loading the policy.

    Raises:
      ArtifactError: If the class of the base policy is unknown.
    """
    return params.modality.layout(params.policy, base)


def make_optimizer(model: nn.Module, training: Training) -> PreciseAdamW:
    """Returns AdamW over the trainable parameters."""
    return PreciseAdamW(
        trainable(model).values(),
        lr=training.learning_rate,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,  # one pass over each parameter instead of one per operation
    )
