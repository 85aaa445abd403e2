"""Phases of scripted gripper traces, by hand; and no label knows how or when a rollout ended."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.modalities.action_chunks.model import ChunkShape
from grpo.modalities.action_chunks.phases import (
    NO_PHASE,
    NUM_PHASES,
    PHASE_NAMES,
    choose_labeller,
    label_by_gripper,
    label_by_time,
)
from grpo.modalities.action_chunks.trajectories import describe_chunks
from grpo.objective.chunks import phase_contrast
from grpo.types import ActionChunks, Rollouts

A, P, G, R, T = range(NUM_PHASES)  # approach, pre-grasp, active grip, release ramp, tail
TRACES = {
    "open, close, open": (
        [0, 0, 0.2, 0.4, 1, 1, 0.5, 0.2, 0, 0, 0, 0],
        [A, A, P, P, G, G, G, R, R, R, T, T],
    ),
    "never closes": ([0, 0, 0.2, 0, 0], [A, A, P, A, A]),
    "closes twice": (
        [0, 0.3, 1, 0, 0.2, 0, 0, 0, 0.2, 0.9, 0],
        # Whether it will close again is not known while it has just opened.
        [A, P, G, R, R, R, T, T, P, G, R],
    ),
    "a grip that is not sustained": ([0, 0.6, 0.6, 0, 0], [A, P, P, A, A]),
    "a grip from where it is sustained": ([0.6, 0.8, 0.6, 0.4], [P, G, G, R]),
    "closed to the end": ([0, 1, 1, 1], [A, G, G, G]),
    "touching long before": ([0.3, 0, 0, 0, 1], [P, A, A, A, G]),
}
ROLLOUTS, STEPS = 4, 7
SHAPE = ChunkShape(observations=1, pixels=0, length=8, actions=2, bins=33, positions=1)


@pytest.mark.parametrize("trace", TRACES)
def test_labels_of_scripted_gripper_traces(trace: str):
    closed, expected = TRACES[trace]
    assert label_by_gripper(torch.tensor([closed], dtype=torch.float)).tolist() == [expected]


def test_time_is_in_fifths_of_the_horizon():
    assert label_by_time(torch.zeros(1, 10), max_steps=10).tolist() == [
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    ]
    assert label_by_time(torch.zeros(2, 3), max_steps=5).tolist() == [[0, 1, 2]] * 2


def described(
    labeller: str, action: Tensor, executed: Tensor, max_steps: int = STEPS
) -> ActionChunks:
    """Returns what is known of rollouts that end behind `executed` actions: 0 off their chunks."""
    mask = executed > 0
    return describe_chunks(
        mask,
        action[mask],
        executed[mask],
        shape=SHAPE,
        label=choose_labeller(labeller, max_steps),
    )


@pytest.mark.parametrize("labeller", PHASE_NAMES)
@given(st.data())
@settings(max_examples=50, deadline=None)
def test_no_label_reads_when_a_rollout_ends(labeller: str, data: st.DataObject):
    """However many actions of every rollout are cut off, the chunks that remain keep their labels.

    A chunk may lose some of its own actions, and the batch its longest rollout.
    """
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    # Chunks of every share of closing actions, the gripper's being the last number of an action.
    action = torch.randint(0, SHAPE.bins, (ROLLOUTS, STEPS, SHAPE.tokens), generator=generator)
    tendency = torch.rand(ROLLOUTS, STEPS, 1, generator=generator)
    closing = torch.rand(ROLLOUTS, STEPS, SHAPE.length, generator=generator) < tendency
    action[..., 1::2] = torch.where(closing, SHAPE.bins - 1, 0)
    length = st.integers(1, STEPS * SHAPE.length)
    actions = torch.tensor(data.draw(st.lists(length, min_size=ROLLOUTS, max_size=ROLLOUTS)))
    start = torch.arange(STEPS) * SHAPE.length
    executed = (actions[:, None] - start).clamp(0, SHAPE.length)
    executed = executed[:, : int((executed > 0).sum(dim=1).max())]
    whole = described(labeller, action, torch.full((ROLLOUTS, STEPS), SHAPE.length)).phase
    cut = described(labeller, action[:, : executed.shape[1]], executed).phase
    expected = torch.where(executed > 0, whole[:, : executed.shape[1]], NO_PHASE)
    assert torch.equal(cut, expected)


GROUPS, GROUP, CHUNKS = 200, 10, 10


def merely_shorter(labeller: str) -> Rollouts:
    """Returns rollouts of one noisy schedule, of which successes end early, at any action.

    The hand goes from one end to the other and grips on the way; noise is of the rollout and of the
    action.
    """
    generator = torch.Generator().manual_seed(0)
    count, actions = GROUPS * GROUP, CHUNKS * SHAPE.length
    noise = 2 * torch.randn(count, 1, generator=generator)
    noise = noise + 2 * torch.randn(count, actions, generator=generator)
    last = SHAPE.bins - 1
    path = (torch.linspace(0, last, actions) + noise).round().clamp(0, last)
    number = torch.arange(actions)  # a grip from the end of the second chunk to that of the fourth
    is_gripping = (number >= 14) & (number < 32)
    is_closing = is_gripping ^ (torch.rand(count, actions, generator=generator) < 0.03)
    action = torch.stack([path, last * is_closing], dim=2).long().view(count, CHUNKS, SHAPE.tokens)
    solved = torch.rand(count, generator=generator) < 0.5
    end = torch.randint(1, actions + 1, (count,), generator=generator)
    end = torch.where(solved, end, actions)
    executed = (end[:, None] - torch.arange(CHUNKS) * SHAPE.length).clamp(0, SHAPE.length)
    mask = executed > 0
    return Rollouts(
        group=torch.arange(GROUPS).repeat_interleave(GROUP),
        reward=solved.float(),
        outcome=solved.float(),
        mask=mask,
        behavior_logp=torch.zeros(mask.shape),
        chunks=described(labeller, action, executed, max_steps=CHUNKS),
    )


@pytest.mark.parametrize("labeller", PHASE_NAMES)
def test_successes_that_are_merely_shorter_have_no_contrast(labeller: str):
    """Squared, within four standard errors of 0: at most 0.023 in every phase."""
    contrast = phase_contrast(merely_shorter(labeller))
    assert not contrast.isnan().any()
    assert (contrast < 0.3).all()
