"""Whether a causal LM can be sampled with a cache: one small rollout against one plain pass."""

import torch
from transformers import PreTrainedModel

from grpo.errors import ArtifactError, brief
from grpo.modalities.tokens.cache import sampling_cache
from grpo.modalities.tokens.forward import PASS_ERRORS, ForwardPasses

PROMPT_MASK = [[False, False, True, True, True], [True] * 5]  # of unequal lengths
KEPT = [1, 0, 1, 0]  # rows of the cache, in another order and number
STEPS = 3
# Of log-probs, in nats. Rounding is far below, another mask or position far above.
TOLERANCES = {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.2, torch.bfloat16: 1.0}


@torch.no_grad()
def require_sampling(model: PreTrainedModel) -> None:
    """Raises ArtifactError unless tokens drawn one by one have the log-probs of plain passes.

    A model may bring a cache of its own, ignore padding, or take other inputs than are passed.
    """
    what = f"{type(model).__name__} cannot be sampled with the cache of its configuration"
    try:
        worst = _largest_difference(model)
    except PASS_ERRORS as error:
        raise ArtifactError(f"{what}, {brief(error)}; choose another model") from None
    if not worst < TOLERANCES[model.dtype]:
        raise ArtifactError(
            f"{what}: a padded rollout must have the log-probs of a pass without padding, they "
            f"differ by {worst:.2g} nats; choose another model"
        )


def _largest_difference(model: PreTrainedModel) -> float:
    """Returns how far log-probs while sampling are from those of unpadded passes, in nats."""
    forward = ForwardPasses(model)
    vocabulary = len(model.get_input_embeddings().weight)
    numbers = torch.arange(1, 1 + 2 * 5 + len(KEPT) * STEPS) % vocabulary
    prompts, tokens = numbers[:10].view(2, 5), numbers[10:].view(len(KEPT), STEPS)
    mask, kept = torch.tensor(PROMPT_MASK), torch.tensor(KEPT)
    cache = sampling_cache(model.config, STEPS)
    with forward.sampling():
        logits = [forward.prompt_logits(prompts, mask, cache)[kept]]
        cache.reorder_cache(kept.to(model.device))
        ahead = forward.look_ahead(mask[kept], STEPS)
        for step in range(STEPS - 1):
            logits.append(forward.next_logits(tokens[:, step : step + 1], ahead.at(step), cache))
    sampled = torch.stack(logits, dim=1).log_softmax(dim=2)
    differences = []
    for row, prompt in enumerate(KEPT):
        read = torch.cat([prompts[prompt][mask[prompt]], tokens[row, :-1]])[None]
        plain = model(input_ids=read.to(model.device), use_cache=False).logits[0, -STEPS:]
        logp = plain.float().cpu().log_softmax(dim=1)
        chosen = tokens[row][:, None]
        differences.append(sampled[row].gather(1, chosen) - logp.gather(1, chosen))
    return float(torch.stack(differences).abs().max())
