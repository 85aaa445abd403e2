"""AdaScope's windows: known knees are found, nothing to find falls back, pilots are judged once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.modalities.denoising.adascope import find_windows
from grpo.modalities.denoising.modality import Scope
from tests.modalities.tiny_denoiser import CAPTIONS, seeded, tiny_denoiser

NUM_STEPS = 20
STEPS = list(range(NUM_STEPS))


def scope_of(**settings: Any) -> Scope:
    """Returns a scope without smoothing, unless told otherwise."""
    chosen: dict[str, Any] = {
        "pilots": 2,
        "steps_per_look": 1,
        "smoothing": 1.0,
        "structure_tolerance": 0.01,
        "preference_tolerance": 0.01,
        "patience": 2,
        "first_look": 1,
        "fallback": (0.1, 0.64),
    }
    return Scope(**{**chosen, **settings})


def falling_until(knee: int) -> Tensor:
    """Returns a curve whose gains fall up to a step and are equal from there on."""
    gains = torch.tensor([max(knee - step, 0) + 1.0 for step in range(NUM_STEPS - 1)])
    return torch.cat([torch.zeros(1), gains.cumsum(0)])


def growing_until(knee: int) -> Tensor:
    """Returns a curve that grows by one a step up to `knee` and then stays."""
    return torch.tensor([float(min(step, knee)) for step in STEPS])


def window_of(structure: Tensor, preference: Tensor, **settings: Any) -> tuple[int, int]:
    found = find_windows(
        structure[:, None], preference[:, None], STEPS, scope_of(**settings), NUM_STEPS
    )
    first, end = found[0].tolist()
    return first, end


@pytest.mark.parametrize("start", [1, 3, 7])
@pytest.mark.parametrize("end", [9, 12, 15])
def test_known_knees_are_found(start: int, end: int):
    """The gain is equal from `start` + 1 on; no reward is gained from `end` on."""
    assert window_of(falling_until(start), growing_until(end)) == (start + 1, end + 1)


def test_curves_without_a_knee_fall_back():
    flat = torch.full((NUM_STEPS,), 0.5)
    assert window_of(flat, flat) == (2, 14)
    falling = -growing_until(NUM_STEPS)
    assert window_of(falling_until(3), falling) == (4, 14)


def test_a_reward_that_grows_to_the_end_keeps_its_window_before_the_last_step():
    assert window_of(falling_until(3), growing_until(30), fallback=(0.1, 1.0)) == (4, 19)


def test_a_window_is_never_empty():
    late = window_of(falling_until(25), growing_until(2), fallback=(0.95, 0.1))
    assert late == (18, 19)


def test_one_look_with_a_small_gain_is_no_knee():
    bumpy = growing_until(15)
    bumpy[6:] -= 1.0  # the step to 6 gains nothing, those behind it do
    assert window_of(falling_until(2), bumpy) == (3, 16)
    assert window_of(falling_until(2), bumpy, patience=1) == (3, 6)


def test_smoothing_answers_late():
    first, end = window_of(falling_until(3), growing_until(9), smoothing=0.3)
    assert first >= 4
    assert end > 10


def test_a_window_is_its_pilots_own():
    structure = torch.stack([falling_until(3), falling_until(5)], dim=1)
    preference = torch.stack([growing_until(9), growing_until(12)], dim=1)
    order = torch.tensor([1, 0])
    found = find_windows(structure, preference, STEPS, scope_of(), NUM_STEPS)
    swapped = find_windows(structure[:, order], preference[:, order], STEPS, scope_of(), NUM_STEPS)
    assert found.tolist() == [[4, 10], [6, 13]]
    assert swapped.tolist() == found[order].tolist()


def scoped(**settings: Any):
    """Returns a policy of 9 steps whose pilots are judged by their brightness, and the calls."""
    calls: list[list[str]] = []

    def judge(captions: list[str], media: Tensor) -> list[float]:
        calls.append(captions)
        return (media.flatten(1).float().mean(dim=1) / 255).tolist()

    policy = tiny_denoiser(num_steps=9, window=(0, 8), scope=scope_of(**settings))
    policy.judge = judge
    return policy, calls


def test_every_pilot_is_judged_once_at_every_look_and_paid_for():
    policy, calls = scoped(steps_per_look=2)
    trajectory, _ = policy.sample(CAPTIONS, group_sizes=[2, 2, 2], generator=seeded())
    assert calls == [[each for each in CAPTIONS for _ in range(2)]] * 5
    assert policy.cost.judge_calls == 5 * 6
    assert policy.cost.sampled_steps == 9 * (6 + 6)
    for prompt in range(3):
        rows = trajectory.mask[trajectory.group == prompt]
        assert len(rows.unique(dim=0)) == 1
        steps = rows[0].nonzero()[:, 0]
        assert steps.diff().eq(1).all()


def test_one_step_per_prompt_lies_in_the_prompts_window():
    wide, _ = scoped()
    windows = wide.sample(CAPTIONS, group_sizes=[2, 2, 2], generator=seeded())[0].mask
    single, _ = scoped()
    single.decoding = tiny_denoiser(
        num_steps=9, window=(0, 8), scope=scope_of(), stochastic="one_per_prompt"
    ).decoding
    mask = single.sample(CAPTIONS, group_sizes=[2, 2, 2], generator=seeded())[0].mask
    assert (mask.sum(dim=1) == 1).all()
    assert not (mask & ~windows).any()


def test_a_scope_that_holds_all_steps_is_its_host():
    """The same rollouts from the same generator, behind the pilots' own draws."""
    policy, _ = scoped(structure_tolerance=2.0, first_look=0, fallback=(0.0, 1.0))
    policy.judge = lambda captions, media: [0.0] * len(captions)
    host = tiny_denoiser(num_steps=9, window=(0, 8))
    generator = seeded()
    torch.randn(6, 1, 8, 16, generator=generator)
    expected, logp = host.sample(CAPTIONS, group_sizes=[2, 2, 2], generator=generator)
    ours, own = policy.sample(CAPTIONS, group_sizes=[2, 2, 2], generator=seeded())
    assert torch.equal(ours.mask, expected.mask)
    assert torch.equal(ours.media, expected.media)
    assert torch.equal(own, logp)


def test_a_scope_without_a_judge_is_refused():
    policy, _ = scoped()
    policy.judge = None
    with pytest.raises(ValueError, match="needs a judge"):
        policy.sample(CAPTIONS, group_sizes=[1, 1, 1], generator=seeded())
