"""Log-probs and entropies from hidden states in chunks, and sampling from logits."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

KEPT_LOGITS = 2**26  # kept for the backward pass (256 MiB in float32); more are recomputed
CHUNK_LOGITS = 2**24  # computed at once
CACHED_LOGITS = 2**19  # fit into a CPU's cache between operators (2 MiB)
BLOCK = 128  # tokens per block sum
UNDIVIDED = 4 * BLOCK  # largest vocabulary without blocks
BELOW_ONE = 1 - 2**-52


class TokenScores(NamedTuple):
    """Log-probs and entropies of token steps in nats, 0 at steps that are not needed."""

    logp: Float[Tensor, "rollout step"]
    entropy: Float[Tensor, "rollout step"] | None  # of the token's distribution; None: not computed


def num_recomputed(num_positions: int, vocabulary: int) -> int:
    """Returns the number of positions whose logits the backward pass recomputes."""
    return num_positions if num_positions * vocabulary > KEPT_LOGITS else 0


def peak_logits_bytes(num_positions: int, vocabulary: int, itemsize: int) -> int:
    """Returns the largest bytes of the logits of positions in a pass with gradients.

    Args:
      itemsize: Bytes of a number of the head. Of a recomputed chunk there are its logits, in
        float32, and their gradient in the dtype of the head.
    """
    if num_recomputed(num_positions, vocabulary):
        return (4 + itemsize) * CHUNK_LOGITS
    return 4 * num_positions * vocabulary


def chosen_log_prob(
    hidden: Float[Tensor, "position hidden"],
    head: nn.Linear,
    chosen: Int[Tensor, " position"],
    temperature: float,
) -> Float[Tensor, " position"]:
    """Returns log softmax(head(hidden) / temperature)[chosen] in nats, in float32 or better."""
    logp, _ = _score(hidden, head, chosen, temperature, with_entropy=False)
    return logp


def score_tokens(
    hidden: Float[Tensor, "rollout step hidden"],
    head: nn.Linear,
    tokens: Int[Tensor, "rollout step"],
    needed: Bool[Tensor, "rollout step"],
    temperature: float,
    *,
    with_entropy: bool,
) -> TokenScores:
    """Returns the log-probs of tokens under softmax(head(hidden) / temperature), and its entropies.

    Only the needed steps reach the head.
    """
    chosen = tokens[needed]
    logp, entropy = _score(hidden[needed], head, chosen, temperature, with_entropy=with_entropy)
    blank = logp.new_zeros(needed.shape)
    return TokenScores(
        logp=blank.masked_scatter(needed, logp),
        entropy=blank.masked_scatter(needed, entropy) if with_entropy else None,
    )


def score_logits(
    logits: Float[Tensor, "rollout step token"],
    tokens: Int[Tensor, "rollout step"],
    needed: Bool[Tensor, "rollout step"],
    temperature: float,
    *,
    with_entropy: bool,
) -> TokenScores:
    """Returns the scores of `score_tokens` from logits, for models that post-process them."""
    scaled = logits.float() / temperature
    picked = scaled.gather(2, tokens[:, :, None])[:, :, 0]
    logp = torch.where(needed, picked - scaled.logsumexp(dim=2), 0.0)
    if not with_entropy:
        return TokenScores(logp, None)
    return TokenScores(logp, torch.where(needed, entropy_of(scaled.log_softmax(dim=2)), 0.0))


def entropy_of(log_softmax: Float[Tensor, "*step token"]) -> Float[Tensor, "*step"]:
    """Returns -sum_k p_k log p_k in nats; a token of probability 0 adds 0."""
    # Masked before the product: 0 * -inf is NaN, and so is its gradient.
    finite = torch.where(log_softmax == -torch.inf, 0.0, log_softmax)
    return -(log_softmax.exp() * finite).sum(dim=-1)


def _score(
    hidden: Float[Tensor, "position hidden"],
    head: nn.Linear,
    chosen: Int[Tensor, " position"],
    temperature: float,
    *,
    with_entropy: bool,
) -> tuple[Float[Tensor, " position"], Float[Tensor, " scored"]]:
    """Returns log-probs, and entropies or nothing, in nats, in float32 or better."""
    keep = torch.is_grad_enabled() and num_recomputed(len(hidden), len(head.weight)) == 0
    result: tuple[Tensor, Tensor] = _ChosenLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, chosen, temperature, keep, with_entropy
    )
    return result


def draw(
    logits: Float[Tensor, "rollout token"],
    uniform: Float[Tensor, " rollout"],
    temperature: float,
) -> tuple[Int[Tensor, " rollout"], Float[Tensor, " rollout"]]:
    """Returns a token per row by inverse-CDF sampling, and its log-prob in nats, on the host.

    Logits stay on their device; few numbers of each row are copied. Cumulative sums are in float64
    and run on the host in order, so they never fall; a GPU adds in another order. For large
    vocabularies, they first run over blocks of BLOCK tokens and then within the chosen block. A
    token with probability 0 is never sampled. Logits that are not finite give a log-prob of NaN.
    """
    top = logits.amax(dim=1, keepdim=True)
    mass = logits - top
    if temperature != 1.0:
        mass.div_(temperature)
    mass.exp_()
    below_one = uniform[:, None].clamp(max=BELOW_ONE)  # so that a product stays below the total
    if logits.shape[1] <= UNDIVIDED:
        cumulative = mass.cpu().cumsum(dim=1, dtype=torch.float64)
        total = cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, below_one * total, right=True)
    else:
        chosen, total = _invert_by_blocks(mass, below_one)
    # Only logits that are not finite reach the bound; their log-prob is NaN, which callers check.
    chosen = chosen.clamp(max=logits.shape[1] - 1)
    above = (logits.gather(1, chosen.to(logits.device)) - top).cpu()
    logp = above.double() / temperature - total.log()
    return chosen[:, 0], logp[:, 0].to(logits.dtype)


def _invert_by_blocks(
    mass: Float[Tensor, "row token"], fraction: Float[Tensor, "row one"]
) -> tuple[Int[Tensor, "row one"], Float[Tensor, "row one"]]:
    """Returns the token at which the cumulative mass reaches a fraction, and the total mass."""
    rows, vocabulary = mass.shape
    if vocabulary % BLOCK:  # `pad` copies even without padding to add
        mass = nn.functional.pad(mass, (0, -vocabulary % BLOCK))
    blocks = mass.view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=2).cpu().cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = fraction * total
    block = torch.searchsorted(cumulative, point, right=True).clamp(max=blocks.shape[1] - 1)
    before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
    chosen = blocks[torch.arange(rows), block[:, 0]].cpu()
    within = chosen.cumsum(dim=1, dtype=torch.float64)
    rest = (point - before).minimum(within[:, -1:] * BELOW_ONE)  # block sums are rounded
    return block * BLOCK + torch.searchsorted(within, rest, right=True), total


class _ChosenLogProb(torch.autograd.Function):
    """logp = z[chosen] - logsumexp(z), z = head(hidden) / temperature, chunk by chunk.

    With p = softmax(z), d logp / d z = onehot(chosen) - p, and the entropy H = -sum p log p has
    d H / d z = -p (log p + H). The forward pass keeps p if it is small enough (KEPT_LOGITS);
    otherwise the backward pass recomputes each chunk.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chosen: Tensor,
        temperature: float,
        keep: bool,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logp = hidden.new_empty(len(hidden), dtype=_precise(hidden.dtype))
        entropy = logp.new_empty(len(hidden) if with_entropy else 0)
        kept = []
        for rows in _chunks(len(hidden), len(weight), CHUNK_LOGITS):
            softmax, logp[rows] = _softmax(hidden[rows], weight, bias, chosen[rows], temperature)
            if with_entropy:
                entropy[rows] = torch.special.entr(softmax).sum(dim=1)
            if keep:
                kept.append(softmax)
        context.save_for_backward(hidden, weight, bias, chosen, entropy, *kept)
        context.temperature, context.with_entropy = temperature, with_entropy
        return logp, entropy

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, chosen, entropy, *kept = context.saved_tensors
        gradient, of_entropy = gradients
        needs_hidden, needs_weight, needs_bias, *_ = context.needs_input_grad
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        for index, rows in enumerate(_chunks(len(hidden), len(weight), CHUNK_LOGITS)):
            if kept:
                softmax = kept[index]
            else:
                softmax, _ = _softmax(hidden[rows], weight, bias, chosen[rows], context.temperature)
            scale = gradient[rows, None] / context.temperature
            added = None
            if context.with_entropy:
                towards = of_entropy[rows, None] / context.temperature
                # p log p is -entr(p), which is 0 where p is.
                added = (torch.special.entr(softmax) - softmax * entropy[rows, None]) * towards
            to_logits = softmax.mul_(-scale)  # in place, so the graph allows one backward pass
            if added is not None:
                to_logits += added
            to_logits.scatter_add_(1, chosen[rows, None], scale)
            to_logits = to_logits.to(weight.dtype)
            if to_hidden is not None:
                torch.mm(to_logits, weight, out=to_hidden[rows])
            if to_weight is not None:
                to_weight.addmm_(to_logits.T, hidden[rows])
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None, None, None


def _softmax(
    hidden: Float[Tensor, "position hidden"],
    weight: Float[Tensor, "token hidden"],
    bias: Float[Tensor, " token"] | None,
    chosen: Int[Tensor, " position"],
    temperature: float,
) -> tuple[Float[Tensor, "position token"], Float[Tensor, " position"]]:
    """Returns the softmax of the scaled logits and the log-probs of the chosen tokens."""
    logits = nn.functional.linear(hidden, weight, bias).to(_precise(hidden.dtype))
    logp = logits.new_empty(len(logits))
    size = CACHED_LOGITS if logits.is_cpu else CHUNK_LOGITS  # small operators are slow on a GPU
    for rows in _chunks(len(logits), len(weight), size):
        part = logits[rows]
        if temperature != 1.0:
            part.div_(temperature)
        part.sub_(part.amax(dim=1, keepdim=True))
        picked = part.gather(1, chosen[rows, None])
        total = part.exp_().sum(dim=1, keepdim=True)
        part.div_(total)
        logp[rows] = (picked - total.log())[:, 0]
    return logits, logp


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Returns a dtype of at least 32 bits: 16 bits are too few for exponentials."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_positions: int, vocabulary: int, num_logits: int) -> list[slice]:
    """Returns slices of positions with at most `num_logits` logits each, or one position."""
    size = max(1, num_logits // vocabulary)
    return [slice(start, start + size) for start in range(0, num_positions, size)]
