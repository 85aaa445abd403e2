"""Denoising steps x' = a x + b v + s eps for the densities of the literature.

sigma is the fraction of noise in x: 1 at the start, 0 at the image. x = (1 - sigma) x0 + sigma x1
and v = x1 - x0. All densities are Gaussians whose mean is linear in the state x and the model's
velocity v, so one implementation serves sampling and log-probs of all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from grpo.modalities.denoising.modality import Density, Scope, Variants
from grpo.types import StepNoise

TIME = 1000.0  # the transformer's time at sigma 1
MOST_STEPS_AHEAD = 4  # largest ratio of a step to 1 - sigma before 1 - after replaces 1 - sigma
MATCHED = "matched"


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Sampling settings. They define the density, so log-probs use the same values."""

    num_steps: int
    density: Density
    noise_level: float  # in units of `density` (see `sde_kernels`)
    stochastic: Literal["all", "one_per_prompt", "none"]  # the noisy steps within `window`
    window: tuple[int, int]  # half-open range [first, end) of steps
    guidance: float  # scale of classifier-free guidance; 1: none
    scope: Scope | None = None  # measures a window per prompt; None: `window` for all
    variants: Variants | None = None  # perturbed conditions of prompts; None: unchanged prompts


class Kernel(NamedTuple):
    """Coefficients of x and v in a step's mean, and its standard deviation (0: deterministic)."""

    state: float
    velocity: float
    std: float

    @property
    def noise_scale(self) -> float:
        """lambda in grad_v log p(x' | x) = lambda eps, the strength of a step's gradient."""
        return abs(self.velocity) / self.std


class Schedule(NamedTuple):
    """The time of every step and its kernels without and with noise."""

    time: Float[Tensor, " step"]  # in the transformer's units
    exact: list[Kernel]
    noisy: list[Kernel]

    def noise_at(self, mask: Bool[Tensor, "rollout step"]) -> StepNoise:
        """Returns the noise parameters of the steps in the mask, 0 elsewhere."""
        columns = (
            [each.noise_scale if each.std else 0.0 for each in self.noisy],
            [each.std for each in self.noisy],
            [-each.velocity for each in self.exact],
        )
        return StepNoise(*(mask * torch.tensor(column) for column in columns))


def make_schedule(sigmas: Sequence[float], decoding: Denoising) -> Schedule:
    """Returns the schedule for some sigmas.

    Args:
      sigmas: Descending from at most 1 to 0, one more than there are steps.
    """
    return Schedule(
        time=torch.tensor(sigmas[:-1]) * TIME,
        exact=[ode_kernel(*pair) for pair in pairwise(sigmas)],
        noisy=sde_kernels(sigmas, decoding.density, decoding.noise_level),
    )


def ode_kernel(sigma: float, after: float) -> Kernel:
    """Returns the Euler step of the probability-flow ODE, which has no noise and no density."""
    return Kernel(1.0, after - sigma, 0.0)


def sde_kernels(sigmas: Sequence[float], density: Density, noise_level: float) -> list[Kernel]:
    """Returns the stochastic step from every sigma to the next.

    The last step, to sigma 0, is deterministic because its noise would remain in the image.

    Args:
      sigmas: Descending from at most 1 to 0, one more than there are steps.
      density: "flow_sde": deviation noise_level sqrt(sigma / (1 - sigma)) [Liu et al., 2025,
        Flow-GRPO], with the next sigma in 1 - sigma where sigma is too close to 1;
        "constant_sde": noise_level [Xue et al., 2025, DanceGRPO]; "interpolated_sde":
        noise_level (last + (second - last) sigma), in terms of the schedule's sigmas
        [code of Flash-GRPO, arXiv 2605.15980]; "preserving": the fraction
        sin(noise_level pi / 2), noise_level in [0, 1], of the next state's noise is fresh, and the
        total noise stays the same [Wang et al., 2025, arXiv 2509.05952]; "matched": the final image
        is noised again, and the true velocity is scored under a unit normal around the model's, so
        that log-probs are minus half a squared error up to a constant
        [Xue et al., 2025, AWM, arXiv 2509.25050].

    Raises:
      ValueError: If the sigmas do not fall to 0 or the noise level is out of range.
    """
    require_falling(sigmas)
    pairs = list(pairwise(sigmas))
    if noise_level <= 0 or (density == "preserving" and noise_level > 1):
        upper = " and at most 1" if density == "preserving" else ""
        raise ValueError(f"noise_level must be above 0{upper} for {density}, got {noise_level}")
    if density == MATCHED:
        return [Kernel(0.0, 1.0, 1.0)] * (len(pairs) - 1) + [ode_kernel(*pairs[-1])]
    kernel = _preserving if density == "preserving" else _euler_maruyama(sigmas, density)
    return [
        *(kernel(sigma, after, noise_level) for sigma, after in pairs[:-1]),
        ode_kernel(*pairs[-1]),
    ]


def require_falling(sigmas: Sequence[float]) -> None:
    """Raises ValueError unless sigmas fall from at most 1 to 0 in two steps or more."""
    falls = all(before > after for before, after in pairwise(sigmas))
    if len(sigmas) < 3 or sigmas[0] > 1 or sigmas[-1] != 0 or not falls:
        raise ValueError(f"sigmas must fall from at most 1 to 0 in two steps or more, got {sigmas}")


def match_velocity(
    clean: Float[Tensor, " rollout *sample"],
    mask: Bool[Tensor, "rollout step"],
    schedule: Schedule,
    generator: Generator,
) -> tuple[Float[Tensor, " drawn *sample"], Float[Tensor, " drawn *sample"]]:
    """Returns images noised again to the sigma of each step in `mask`, and their velocities."""
    rows, steps = mask.nonzero(as_tuple=True)
    image = clean[rows]
    noise = torch.randn(image.shape, generator=generator)
    sigma = (schedule.time[steps] / TIME).view(-1, *[1] * (image.dim() - 1))
    return (1 - sigma) * image + sigma * noise, noise - image


def step_log_prob(
    after: Float[Tensor, " row *sample"],
    mean: Float[Tensor, " row *sample"],
    std: Float[Tensor, " row"],
) -> Float[Tensor, " row"]:
    """Returns log N(after; mean, std^2) in nats, summed over dimensions in float64.

    Unlike the papers, which use the mean over dimensions; `scale_log_ratio` gives that convention.
    """
    deviation = (after - mean).flatten(1).double()
    scale = std.double()
    squares = deviation.square().sum(dim=1) / (2 * scale**2)
    constant = deviation.shape[1] * (scale.log() + 0.5 * math.log(2 * math.pi))
    return (-squares - constant).to(mean.dtype)


def _euler_maruyama(
    sigmas: Sequence[float], density: Density
) -> Callable[[float, float, float], Kernel]:
    """Returns steps of dx = (v + s^2 (x + (1 - sigma) v) / (2 sigma)) dt + s dw.

    For "flow_sde", the variance of a step is noise_level^2 sigma (sigma - after) / (1 - sigma).
    Where 1 - sigma is less than a fourth of the step, 1 - after replaces it, as at sigma 1 in the
    authors' code. Then the deviation is at most 2 noise_level sqrt(sigma) and the coefficient of x
    is in [1 - 2 noise_level^2, 1] for every schedule, so the Euler step is stable for levels up to
    1. The other densities have deviations of at most noise_level sqrt(sigma - after).
    """
    second, last = sigmas[1], sigmas[-1]

    def deviation(sigma: float, after: float, noise_level: float) -> float:
        if density == "flow_sde":
            # Compared with the step: schedulers miss sigma 1 by rounding or by an epsilon.
            is_near_one = sigma - after > MOST_STEPS_AHEAD * (1 - sigma)
            return noise_level * math.sqrt(sigma / (1 - (after if is_near_one else sigma)))
        if density == "constant_sde":
            return noise_level
        return noise_level * (last + (second - last) * sigma)

    def kernel(sigma: float, after: float, noise_level: float) -> Kernel:
        step, s = after - sigma, deviation(sigma, after, noise_level)
        drift = s**2 / (2 * sigma)
        return Kernel(
            state=1 + drift * step,
            velocity=(1 + drift * (1 - sigma)) * step,
            std=s * math.sqrt(-step),
        )

    return kernel


def _preserving(sigma: float, after: float, noise_level: float) -> Kernel:
    """Returns x' = (1 - after) x0 + sqrt(after^2 - s^2) x1 + s eps, s = after sin(level pi / 2)."""
    std = after * math.sin(noise_level * math.pi / 2)
    clean, noise = 1 - after, math.sqrt(after**2 - std**2)
    # x0 = x - sigma v and x1 = x + (1 - sigma) v.
    return Kernel(
        state=clean + noise,
        velocity=-sigma * clean + (1 - sigma) * noise,
        std=std,
    )


def apply_kernel(
    kernels: Sequence[Kernel],
    state: Float[Tensor, " row *sample"],
    velocity: Float[Tensor, " row *sample"],
) -> tuple[Float[Tensor, " row *sample"], Float[Tensor, " row"]]:
    """Returns the mean and deviation of each row under its kernel."""
    shape = (-1, *[1] * (state.dim() - 1))
    of_state, of_velocity, std = (
        torch.tensor(column, dtype=state.dtype, device=state.device) for column in zip(*kernels)
    )
    return of_state.view(shape) * state + of_velocity.view(shape) * velocity, std
