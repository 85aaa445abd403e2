"""Warm-up of a fresh flow-matching pipeline on captioned images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import FlopCounterMode

from grpo.modalities.denoising.pipelines import encode_captions, text_encoders, to_state
from grpo.modalities.denoising.sde_steps import TIME
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.optimizer import PreciseAdamW
from grpo.modalities.shared.warmup import (
    WarmupSettings,
    WarmupUpdate,
    learning_rate_at,
    require_low_loss,
    step_on_gradient,
)
from grpo.types import Cost

BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Drawings:
    """Images and their captions."""

    captions: Sequence[str]
    pixels: UInt8[Tensor, " image *sample"]


def match_flow(
    pipeline: Any,
    drawings: Drawings,
    settings: WarmupSettings,
    *,
    num_tokens: int,
    blank_fraction: float,
) -> Iterator[WarmupUpdate]:
    """Trains transformer and text encoders to predict v = x1 - x0 at logit-normal times.

    [Lipman et al., 2023, flow matching; times: Esser et al., 2024, section 3.1]

    Args:
      num_tokens: Caption length of the T5 encoder.
      blank_fraction: Fraction of rows with an empty caption, for classifier-free guidance.

    Raises:
      DivergedError: As `grpo.modalities.shared.warmup.warm_up`.
    """
    modules = [pipeline.transformer, *(encoder for encoder, _ in text_encoders(pipeline))]
    parameters = [each for module in modules for each in module.requires_grad_().parameters()]
    optimizer = PreciseAdamW(parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(settings.seed)
    device = pipeline.transformer.device
    first_loss: float | None = None
    counter: Any = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    for update in range(settings.updates):
        rate = learning_rate_at(update, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.randperm(len(drawings.captions), generator=generator)
        rows = rows[: settings.rows_per_update]
        is_blank = torch.rand(len(rows), generator=generator) < blank_fraction
        captions = [
            "" if blank else drawings.captions[row]
            for row, blank in zip(rows.tolist(), is_blank.tolist())
        ]
        clean = to_state(drawings.pixels[rows])
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.randn(len(rows), generator=generator).sigmoid()
        compute = partial(_loss, pipeline, captions, clean, noise, sigma, num_tokens, device)
        # All updates have the same shapes, so the FLOPs of the first one hold for all.
        with counter if update == 0 else torch.enable_grad():
            loss = compute()
            loss.backward()
        value = step_on_gradient(optimizer, loss, update)
        first_loss = value if first_loss is None else first_loss
        cost = Cost(flops=counter.get_total_flops(), trained_steps=len(rows))
        yield WarmupUpdate(update=update, loss=value, learning_rate=rate, cost=cost)
    if first_loss is not None:
        require_low_loss(first_loss, compute, update)


def _loss(
    pipeline: Any,
    captions: list[str],
    clean: Float[Tensor, " row *sample"],
    noise: Float[Tensor, " row *sample"],
    sigma: Float[Tensor, " row"],
    num_tokens: int,
    device: torch.device,
) -> Float[Tensor, ""]:
    """Returns the mean squared error of the velocity."""
    at = sigma.view(-1, *[1] * (clean.dim() - 1))
    output = pipeline.transformer(
        hidden_states=((1 - at) * clean + at * noise).to(device, pipeline.transformer.dtype),
        timestep=(sigma * TIME).to(device),
        return_dict=False,
        **encode_captions(pipeline, captions, num_tokens),
    )[0]
    return mse_loss(output.float(), (noise - clean).to(device))
