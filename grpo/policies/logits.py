"""From hidden states to log-probs and draws, without a log-softmax of every position at once."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

KEPT_LOGITS = 2**26  # what a backward pass may keep (256 MiB in float32); above it, recomputed
CHUNK_LOGITS = 2**24  # what is computed at once
BLOCK = 128  # tokens that are summed before the cumulative sum
BELOW_ONE = 1 - 2**-52


def num_recomputed(num_positions: int, vocabulary: int) -> int:
    """Returns for how many positions a backward pass computes the logits again."""
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
    """Returns a token per row by inversion of the cumulative distribution, and its log-prob.

    The probabilities are added up in blocks of BLOCK tokens, which are added up in float64; then in
    float64 within the block that the number falls into. A token of probability 0 is never drawn.
    """
    rows, vocabulary = logits.shape
    top = logits.amax(dim=1, keepdim=True)
    mass = (logits - top).div_(temperature).exp_()
    if vocabulary % BLOCK:  # `pad` copies even where there is nothing to add
        mass = nn.functional.pad(mass, (0, -vocabulary % BLOCK))
    blocks = mass.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=2).double()
    total = sums.sum(dim=1, keepdim=True)
    block, left = _invert(sums, uniform[:, None] * total)
    within = blocks[torch.arange(rows), block[:, 0]].double()
    offset, _ = _invert(within, left)
    chosen = block * BLOCK + offset
    logp = (logits.gather(1, chosen) - top).double() / temperature - total.log()
    return chosen[:, 0], logp[:, 0].to(logits.dtype)


def _invert(
    mass: Float[Tensor, "row part"], point: Float[Tensor, "row one"]
) -> tuple[Int[Tensor, "row one"], Float[Tensor, "row one"]]:
    """Returns the part that holds a point of the whole, and how far into the part it lies."""
    cumulative = mass.cumsum(dim=1)
    point = point.minimum(cumulative[:, -1:] * BELOW_ONE)  # sums are rounded
    part = torch.searchsorted(cumulative, point, right=True)
    before = cumulative.gather(1, part) - mass.gather(1, part)
    return part, (point - before).clamp_(min=0)


class _ChosenLogProb(torch.autograd.Function):
    """logp = z[chosen] - logsumexp(z), z = head(hidden) / temperature, chunk by chunk.

    d logp / d z = onehot(chosen) - softmax(z). Forward keeps the softmax if it is small enough
    (KEPT_LOGITS), and otherwise computes each chunk again in the backward pass.
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
        for rows in _chunks(len(hidden), len(weight)):
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
        for index, rows in enumerate(_chunks(len(hidden), len(weight))):
            if kept:
                softmax = kept[index]
            else:
                softmax, _ = _softmax(hidden[rows], weight, bias, chosen[rows], context.temperature)
            scale = gradient[rows, None] / context.temperature
            to_logits = softmax.mul_(-scale)  # in place: no second backward pass of this graph
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
    """Returns the softmax of the scaled logits, and the log-prob of what was chosen."""
    logits = nn.functional.linear(hidden, weight, bias).to(_precise(hidden.dtype))
    if temperature != 1.0:
        logits.div_(temperature)
    logits.sub_(logits.amax(dim=1, keepdim=True))
    picked = logits.gather(1, chosen[:, None])
    total = logits.exp_().sum(dim=1, keepdim=True)
    logits.div_(total)
    return logits, (picked - total.log())[:, 0]


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Returns a type of at least 32 bits: exponentials of half as many say too little."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_positions: int, vocabulary: int) -> list[slice]:
    """Returns slices of positions, CHUNK_LOGITS logits each."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, start + size) for start in range(0, num_positions, size)]
