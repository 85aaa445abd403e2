"""Denoising steps: closed forms, the published table, and limits."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.policies.kernels import apply_kernel, ode_kernel, sde_kernels, step_log_prob

DENSITIES = ("flow_sde", "constant_sde", "interpolated_sde", "preserving")
PUBLISHED = (7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754)
CLOSED_FORM = (7.4885, 7.0526, 6.6221, 6.1973, 5.7785, 5.3659, 4.9599, 4.5607, 4.1687, 3.7842)


def shifted(num_steps: int, shift: float) -> list[float]:
    """Returns the schedule of Wan: linear, then shifted towards noise."""
    linear = np.linspace(1, 1 / 1000, num_steps + 1)[:-1]
    return [*(shift * linear / (1 + (shift - 1) * linear)).tolist(), 0.0]


schedules = st.builds(shifted, st.integers(3, 30), st.floats(1.0, 8.0))


@pytest.mark.parametrize("density", DENSITIES)
@given(sigmas=schedules, level=st.floats(0.05, 1.0), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_gradient_of_a_steps_log_prob_is_its_noise_scale_times_its_noise(
    density: str, sigmas: list[float], level: float, seed: int
):
    """|d log p / d v| = lambda |eps| at every step, in float64."""
    generator = torch.Generator().manual_seed(seed)
    for kernel in sde_kernels(sigmas, density, level)[:-1]:
        state, velocity, noise = torch.randn(3, 1, 6, generator=generator, dtype=torch.float64)
        velocity.requires_grad_()
        mean, std = apply_kernel([kernel], state, velocity)
        after = (mean + std[:, None] * noise).detach()
        (gradient,) = torch.autograd.grad(step_log_prob(after, mean, std).sum(), velocity)
        torch.testing.assert_close(
            gradient.abs(), kernel.noise_scale * noise.abs(), rtol=1e-6, atol=1e-9
        )


def test_the_rectification_reproduces_the_published_table():
    """1 / lambda of Flash-GRPO's code: 20 steps, shift 3, its own deviation."""
    kernels = sde_kernels(shifted(20, 3.0), "interpolated_sde", 1.0)
    ours = np.array([1 / each.noise_scale for each in kernels[:10]])
    np.testing.assert_allclose(ours, CLOSED_FORM, rtol=1e-4)
    np.testing.assert_allclose(ours, PUBLISHED, rtol=3e-3)
    assert (np.diff(ours) < 0).all()


@given(sigmas=schedules, level=st.floats(0.05, 1.0))
@settings(max_examples=30, deadline=None)
def test_the_preserving_density_keeps_the_total_noise(sigmas: list[float], level: float):
    """x' of x0 = 0 and x1 of deviation 1 has deviation sigma', whatever the level."""
    for (sigma, after), kernel in zip(pairwise(sigmas), sde_kernels(sigmas, "preserving", level)):
        of_noise = kernel.state * sigma + kernel.velocity  # x = sigma x1, v = x1
        assert math.hypot(of_noise, kernel.std) == pytest.approx(after, abs=1e-9)


@pytest.mark.parametrize("density", DENSITIES[:3])
@given(sigmas=schedules, level=st.floats(0.05, 1.0))
@settings(max_examples=20, deadline=None)
def test_a_step_is_eulers_plus_half_the_variance_along_the_score(
    density: str, sigmas: list[float], level: float
):
    """The marginals stay: the drift gains s^2 / 2 times the score, -(x + (1 - sigma) v) / sigma."""
    for (sigma, after), kernel in zip(
        list(pairwise(sigmas))[:-1], sde_kernels(sigmas, density, level)
    ):
        half_variance = kernel.std**2 / 2
        exact = ode_kernel(sigma, after)
        assert kernel.state - exact.state == pytest.approx(-half_variance / sigma)
        gained = kernel.velocity - exact.velocity
        assert gained == pytest.approx(-half_variance * (1 - sigma) / sigma)


@pytest.mark.parametrize("density", DENSITIES)
def test_without_noise_every_density_is_eulers_step(density: str):
    sigmas = shifted(10, 3.0)
    for (sigma, after), kernel in zip(pairwise(sigmas), sde_kernels(sigmas, density, 1e-6)):
        assert kernel == pytest.approx(ode_kernel(sigma, after), abs=1e-5)


@pytest.mark.parametrize("density", DENSITIES)
def test_the_last_step_has_no_noise(density: str):
    *_, last = sde_kernels(shifted(5, 1.0), density, 0.5)
    assert last.std == 0


def test_a_log_prob_is_that_of_torchs_normal_distribution():
    after, mean = torch.randn(2, 4, 1, 3, 5, generator=torch.Generator().manual_seed(0))
    std = torch.tensor([0.1, 0.5, 1.0, 2.0])
    expected = torch.distributions.Normal(mean.double(), std.double().view(-1, 1, 1, 1)).log_prob(
        after.double()
    )
    ours = step_log_prob(after, mean, std)
    torch.testing.assert_close(ours.double(), expected.sum(dim=(1, 2, 3)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("sigmas", "density", "level", "message"),
    [
        ([1.0, 0.5], "flow_sde", 0.7, "must fall from at most 1 to 0"),
        ([1.0, 0.5, 0.6, 0.0], "flow_sde", 0.7, "must fall from at most 1 to 0"),
        ([1.0, 0.5, 0.0], "flow_sde", 0.0, "noise_level must be above 0"),
        ([1.0, 0.5, 0.0], "preserving", 1.5, "above 0 and at most 1 for preserving"),
    ],
)
def test_wrong_schedules_and_levels_are_refused(
    sigmas: list[float], density: str, level: float, message: str
):
    with pytest.raises(ValueError, match=message):
        sde_kernels(sigmas, density, level)
