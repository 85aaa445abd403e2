"""Log-probs from hidden states in chunks, and sampling from logits."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

KEPT_LOGITS = 2**26  # kept for the backward pass (256 MiB in float32); more are recomputed
CHUNK_LOGITS = 2**24  # computed at once
CACHED_LOGITS = 2**19  # fit into a CPU's cache between operators (2 MiB)
BLOCK = 128  # tokens per block sum
UNDIVIDED = 4 * BLOCK  # largest vocabulary without blocks
BELOW_ONE = 1 - 2**-52


def num_recomputed(num_positions: int, vocabulary: int) -> int:
    """Returns the number of positions whose logits the backward pass recomputes."""
    return num_positions if num_positions * vocabulary > KEPT_LOGITS else 0


def chosen_log_prob(
    hidden: Float[Tensor, "position hidden"],
    head: nn.Linear,
    chosen: Int[Tensor, " position"],
    temperature: float,
) -> Float[Tensor, " position"]:
    """Returns log softmax(head(hidden) / temperature)[chosen] in nats, in float32 or better."""
    keep = torch.is_grad_enabled() and num_recomputed(len(hidden), len(head.weight)) == 0
    result: Tensor = _ChosenLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, chosen, temperature, keep
    )
    return result


def draw(
    logits: Float[Tensor, "rollout token"],
    uniform: Float[Tensor, " rollout"],
    temperature: float,
) -> tuple[Int[Tensor, " rollout"], Float[Tensor, " rollout"]]:
    """Returns a token per row by inverse-CDF sampling, and its log-prob in nats.

    Cumulative sums are in float64. For large vocabularies, they first run over blocks of BLOCK
    tokens and then within the chosen block. A token with probability 0 is never sampled. Logits
    that are not finite give a log-prob of NaN.
    """
    top = logits.amax(dim=1, keepdim=True)
    mass = logits - top
    if temperature != 1.0:
        mass.div_(temperature)
    mass.exp_()
    below_one = uniform[:, None].clamp(max=BELOW_ONE)  # so that a product stays below the total
    if logits.shape[1] <= UNDIVIDED:
        cumulative = mass.cumsum(dim=1, dtype=torch.float64)
        total = cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, below_one * total, right=True)
    else:
        chosen, total = _invert_by_blocks(mass, below_one)
    # Only logits that are not finite reach the bound; their log-prob is NaN, which callers check.
    chosen = chosen.clamp(max=logits.shape[1] - 1)
    logp = (logits.gather(1, chosen) - top).double() / temperature - total.log()
    return chosen[:, 0], logp[:, 0].to(logits.dtype)


def _invert_by_blocks(
    mass: Float[Tensor, "row token"], fraction: Float[Tensor, "row one"]
) -> tuple[Int[Tensor, "row one"], Float[Tensor, "row one"]]:
    """Returns the token at which the cumulative mass reaches a fraction, and the total mass."""
    rows, vocabulary = mass.shape
    if vocabulary % BLOCK:  # `pad` copies even without padding to add
        mass = nn.functional.pad(mass, (0, -vocabulary % BLOCK))
    blocks = mass.view(rows, -1, BLOCK)
    cumulative = blocks.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = fraction * total
    block = torch.searchsorted(cumulative, point, right=True).clamp(max=blocks.shape[1] - 1)
    before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
    within = blocks[torch.arange(rows), block[:, 0]].cumsum(dim=1, dtype=torch.float64)
    rest = (point - before).minimum(within[:, -1:] * BELOW_ONE)  # block sums are rounded
    return block * BLOCK + torch.searchsorted(within, rest, right=True), total


class _ChosenLogProb(torch.autograd.Function):
    """logp = z[chosen] - logsumexp(z), z = head(hidden) / temperature, chunk by chunk.

    d logp / d z = onehot(chosen) - softmax(z). The forward pass keeps the softmax if it is small
    enough (KEPT_LOGITS); otherwise the backward pass recomputes each chunk.
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
    ) -> Tensor:
        logp = hidden.new_empty(len(hidden), dtype=_precise(hidden.dtype))
        kept = []
        for rows in _chunks(len(hidden), len(weight), CHUNK_LOGITS):
            softmax, logp[rows] = _softmax(hidden[rows], weight, bias, chosen[rows], temperature)
            if keep:
                kept.append(softmax)
        context.save_for_backward(hidden, weight, bias, chosen, *kept)
        context.temperature = temperature
        return logp

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, chosen, *kept = context.saved_tensors
        (gradient,) = gradients
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
            to_logits = softmax.mul_(-scale)  # in place, so the graph allows one backward pass
            to_logits.scatter_add_(1, chosen[rows, None], scale)
            to_logits = to_logits.to(weight.dtype)
            if to_hidden is not None:
                torch.mm(to_logits, weight, out=to_hidden[rows])
            if to_weight is not None:
                to_weight.addmm_(to_logits.T, hidden[rows])
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None, None


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
