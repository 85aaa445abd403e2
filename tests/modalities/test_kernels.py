"""Denoising steps: closed forms, the published table, and limits."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.errors import ArtifactError
from grpo.modalities.denoising.modality import Canvas
from grpo.modalities.denoising.pipelines import find_unsupported_setting, library, sigmas_of
from grpo.modalities.denoising.sde_steps import apply_kernel, ode_kernel, sde_kernels, step_log_prob
from tests.modalities.tiny_pipelines import WAN_SCHEDULER, tiny_sd3, tiny_wan

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


PIPELINES = {"sd3": tiny_sd3(), "wan": tiny_wan()}
BENT = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")


def pipeline_with(name: str, **settings: Any) -> Any:
    """Returns a pipeline whose scheduler is of its own class, with these settings."""
    pipeline = PIPELINES[name]
    classes = {
        "sd3": library.FlowMatchEulerDiscreteScheduler,
        "wan": library.UniPCMultistepScheduler,
    }
    own = WAN_SCHEDULER if name == "wan" else {}
    pipeline.scheduler = classes[name](**{**own, **settings})
    return pipeline


@st.composite
def schedules_of_diffusers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Returns a pipeline's name and settings of its scheduler that are not refused."""
    shift = draw(st.floats(1.0, 12.0) | st.sampled_from([1.0, 1.18, 1.57, 3.0, 5.0]))
    kind = draw(st.sampled_from(["static", "dynamic", "wan"]))
    if kind == "wan":
        return "wan", {"flow_shift": shift}
    settings: dict[str, Any] = {"shift": shift}
    if kind == "dynamic":
        settings = {
            "use_dynamic_shifting": True,
            "base_shift": draw(st.floats(0.1, 1.0)),
            "max_shift": math.log(shift) + 1.0,
            "time_shift_type": draw(st.sampled_from(["exponential", "linear"])),
            "shift_terminal": draw(st.none() | st.just(0.02)),
        }
    if (bent := draw(st.none() | st.sampled_from(BENT))) is not None:
        settings[bent] = True
    return "sd3", settings


@given(
    scheduler=schedules_of_diffusers(),
    num_steps=st.integers(2, 50),
    density=st.sampled_from(DENSITIES),
    level=st.floats(0.01, 1.0),
    side=st.integers(1, 16),
)
@settings(max_examples=150, deadline=None)
def test_no_schedule_of_diffusers_gives_a_step_more_noise_than_its_level_bounds(
    scheduler: tuple[str, dict[str, Any]], num_steps: int, density: str, level: float, side: int
):
    """With dt = sigma - after and a the level, at most: flow_sde 2 a sqrt(sigma); constant_sde

    a sqrt(dt); interpolated_sde a sigma sqrt(dt); preserving after sin(a pi / 2). The state's
    factor lies in [1 - 2 a^2, 1], and the velocity's is at most dt (1 + a^2 / 2) + a^2 / 2.
    """
    name, changed = scheduler
    pipeline = pipeline_with(name, **changed)
    assert find_unsupported_setting(pipeline) is None
    canvas = Canvas(frames=1, height=16 * side, width=16 * side)
    try:
        sigmas = sigmas_of(pipeline, num_steps, canvas)
    except ArtifactError:  # bent so far that two sigmas are one, or a shift of 0
        return
    kernels = sde_kernels(sigmas, density, level)
    for (sigma, after), kernel in list(zip(pairwise(sigmas), kernels))[:-1]:
        dt = sigma - after
        bound = {
            "flow_sde": 2 * level * math.sqrt(sigma),
            "constant_sde": level * math.sqrt(dt),
            "interpolated_sde": level * sigma * math.sqrt(dt),
            "preserving": after * math.sin(level * math.pi / 2),
        }[density]
        assert 0 < kernel.std <= bound * (1 + 1e-9)
        assert kernel.std <= 2 * level or density == "preserving"
        assert 1 - 2 * level**2 - 1e-9 <= kernel.state <= 1 + 1e-9
        moved = sigma if density == "preserving" else dt * (1 + level**2 / 2) + level**2 / 2
        assert abs(kernel.velocity) <= moved + 1e-9


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_the_first_step_at_almost_full_noise_is_that_at_full_noise(shift: float):
    """Wan's scheduler starts at 0.999999: no other step than from 1, up to that difference."""
    pipeline = pipeline_with("wan", flow_shift=shift)
    sigmas = sigmas_of(pipeline, 20, Canvas(frames=1, height=16, width=16))
    assert 0 < 1 - sigmas[0] < 2e-6
    first, *_ = sde_kernels(sigmas, "flow_sde", 0.7)
    exact, *_ = sde_kernels([1.0, *sigmas[1:]], "flow_sde", 0.7)
    assert first == pytest.approx(exact, abs=1e-4)
    assert exact.std == pytest.approx(0.7)
