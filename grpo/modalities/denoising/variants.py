"""E2PO's prompt variants: perturbed token embeddings with similar meaning, far from each other.

[Hu et al., 2026, arXiv 2605.15803] The flow model and the text encoders are frozen. Optimization
perturbs the embeddings of a caption's tokens, but not those of special tokens and padding.

Constants are reconstructions: the paper prints no anchor, tolerance or learning rate.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grpo.modalities.denoising.modality import Variants
from grpo.modalities.denoising.pipelines import encode_captions, pool_conditions, text_encoders
from grpo.modalities.shared.flops import missing_flop_formulas


class Perturbation:
    """A perturbation of one text encoder's embeddings; created at the first forward pass.

    Its unit is the root mean square of the embeddings, so that the scale of an encoder's embeddings
    does not matter.
    """

    def __init__(self, special: list[int], init: float, generator: Generator) -> None:
        """Args:
        special: Ids of special tokens, which are not perturbed.
        init: Deviation of the initial perturbation.
        """
        self.special = torch.tensor(special)
        self.init = init
        self.generator = generator
        self.rms = 0.0  # of the embeddings
        self.delta: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Perturbs the embeddings of content tokens; a forward hook."""
        content = ~torch.isin(args[0], self.special.to(args[0].device))
        if self.delta is None:
            self.rms = float(output.detach().float().square().mean().sqrt())
            noise = torch.randn(output.shape, generator=self.generator)
            self.delta = (noise * self.init).to(output.device).requires_grad_()
        return output + (self.delta * self.rms * content[..., None]).to(output.dtype)


def find_variants(
    pipeline: Any,
    captions: list[str],
    num_tokens: int,
    settings: Variants,
    generator: Generator,
) -> tuple[dict[str, Float[Tensor, "row ..."]], int]:
    """Returns the conditions of `count - 1` variants of every caption and the FLOPs.

    Rows are grouped by caption. A loss keeps the cosine of each variant's pooled embedding with the
    caption's at `similarity` within `tolerance`, and pushes variants of one caption apart.
    """
    number = settings.count - 1
    repeated = [caption for caption in captions for _ in range(number)]
    with torch.no_grad():
        anchor = pool_conditions(pipeline, encode_captions(pipeline, captions, num_tokens))
    anchor = anchor.repeat_interleave(number, dim=0)
    counter = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    with torch.enable_grad(), perturbed(pipeline, settings.init, generator) as perturbations:
        with torch.no_grad():
            found = encode_captions(pipeline, repeated, num_tokens)
        deltas = [each.delta for each in perturbations if each.delta is not None]
        optimizer = torch.optim.Adam(deltas, lr=settings.learning_rate)
        for update in range(settings.updates):
            with counter if update == 0 else nullcontext():
                conditions = encode_captions(pipeline, repeated, num_tokens)
                loss = _loss(pool_conditions(pipeline, conditions), anchor, settings)
                gradients = torch.autograd.grad(loss, deltas)
            for delta, gradient in zip(deltas, gradients, strict=True):
                delta.grad = gradient
            optimizer.step()
        if settings.updates:
            with torch.no_grad():
                found = encode_captions(pipeline, repeated, num_tokens)
    # All updates have the same shapes, so the FLOPs of the first one hold for all.
    return found, counter.get_total_flops() * settings.updates


@contextmanager
def perturbed(pipeline: Any, init: float, generator: Generator) -> Iterator[list[Perturbation]]:
    """Perturbs within the embeddings of the text encoders that the pooled embedding depends on.

    The other encoders stay unchanged: no loss would keep their perturbation near the caption.
    """
    perturbations, hooks = [], []
    for encoder, tokenizer in text_encoders(pipeline, pooled=True):
        each = Perturbation(tokenizer.all_special_ids, init, generator)
        perturbations.append(each)
        vocabulary = encoder.config.vocab_size
        for module in encoder.modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary:
                hooks.append(module.register_forward_hook(each))
    try:
        yield perturbations
    finally:
        for hook in hooks:
            hook.remove()


def blend(
    conditions: dict[str, Float[Tensor, "prompt ..."]],
    variants: dict[str, Float[Tensor, "row ..."]],
    group: Int[Tensor, " rollout"],
    variant: Int[Tensor, " rollout"],
    share: float,
) -> dict[str, Float[Tensor, "rollout ..."]]:
    """Returns each rollout's conditions: share * variant + (1 - share) * caption.

    Args:
      variants: Conditions from `find_variants`.
      variant: Number of the variant; 0: the unchanged caption.
    """
    blended = {}
    for name, each in conditions.items():
        given = each[group].clone()
        number = len(variants[name]) // len(each)
        changed = variant > 0
        other = variants[name][group[changed] * number + variant[changed] - 1]
        given[changed] += share * (other - given[changed])
        blended[name] = given
    return blended


def variant_weight(sigma: float, share: float) -> float:
    """Returns the weight of variants at sigma: 1 at sigma 1, linear to 0 at 1 - share."""
    return min(max((sigma - (1 - share)) / share, 0.0), 1.0)


def _loss(
    pooled: Float[Tensor, "row dim"], anchor: Float[Tensor, "row dim"], settings: Variants
) -> Float[Tensor, ""]:
    """Returns the sum over captions of pairwise cosines and distances from the anchor's band."""
    number = settings.count - 1
    likeness = torch.cosine_similarity(pooled, anchor, dim=-1)
    outside = (likeness - settings.similarity).abs() - settings.tolerance
    total = outside.clamp(min=0).sum()
    by_caption = torch.nn.functional.normalize(pooled, dim=-1).unflatten(0, (-1, number))
    for first, second in combinations(range(number), 2):
        pair = (by_caption[:, first] * by_caption[:, second]).sum()
        total = total + settings.diversity * pair / math.comb(number, 2)
    return total
