"""Stored token rollouts, selected without a model: which tensor follows which lengths."""

from jaxtyping import Bool, Int
from torch import Tensor, zeros_like

from grpo.errors import ArtifactError

STORED = {"prompt_lengths", "prompt_tokens", "steps", "tokens", "behavior_logp"}
ROUTING = {"prompt_experts", "experts"}  # of a mixture of experts whose choices are replayed


def select_packed(
    tensors: dict[str, Tensor],
    prompt_row: Int[Tensor, " rollout"],
    kept: Bool[Tensor, " rollout"],
) -> dict[str, Tensor]:
    """Returns what `TokenPolicy.pack` stored of some rollouts and their prompts.

    Raises:
      ArtifactError: If the tensors do not fit one another or the rollouts.
    """
    if not STORED <= tensors.keys() <= STORED | ROUTING:
        raise ArtifactError(f"must hold {sorted(STORED)}, got {sorted(tensors)}")
    require_counts(tensors, prompt_row)
    steps, lengths = tensors["steps"], tensors["prompt_lengths"]
    prompts = zeros_like(lengths, dtype=kept.dtype)
    prompts[prompt_row[kept]] = True
    masks = {
        "prompt_lengths": prompts,
        "prompt_tokens": prompts.repeat_interleave(lengths),
        "prompt_experts": prompts.repeat_interleave(lengths),
        "steps": kept,
        "tokens": kept.repeat_interleave(steps),
        "behavior_logp": kept.repeat_interleave(steps),
        "experts": kept.repeat_interleave(steps - 1),  # the last step is never read
    }
    for name, tensor in tensors.items():
        if len(tensor) != len(masks[name]):
            raise ArtifactError(
                f"{name} must have {len(masks[name])} entries by the lengths, got {len(tensor)}"
            )
    return {name: tensor[masks[name]] for name, tensor in tensors.items()}


def require_counts(tensors: dict[str, Tensor], prompt_row: Int[Tensor, " rollout"]) -> None:
    """Raises ArtifactError unless as many rollouts and prompts are stored as their table has."""
    rollouts, prompts = len(tensors["steps"]), len(tensors["prompt_lengths"])
    expected = int(prompt_row.max()) + 1
    if rollouts != len(prompt_row) or prompts != expected:
        raise ArtifactError(
            f"holds {rollouts} rollouts of {prompts} prompts, "
            f"its table {len(prompt_row)} of {expected}"
        )
