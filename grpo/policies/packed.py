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
    steps, lengths = tensors["steps"], tensors["prompt_lengths"]
    if len(steps) != len(kept) or len(lengths) != int(prompt_row.max()) + 1:
        raise ArtifactError(
            f"holds {len(steps)} rollouts of {len(lengths)} prompts, its table {len(kept)} of "
            f"{int(prompt_row.max()) + 1}"
        )
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
