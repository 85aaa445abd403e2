"""Phases of scripted gripper traces, by hand."""

import pytest
import torch

from grpo.policies.phases import NO_PHASE, NUM_PHASES, label_by_gripper, label_by_progress

A, P, G, R, T = range(NUM_PHASES)  # approach, pre-grasp, active grip, release ramp, tail
TRACES = {
    "open, close, open": (
        [0, 0, 0.2, 0.4, 1, 1, 0.5, 0.2, 0, 0, 0, 0],
        [A, A, P, P, G, G, G, R, R, R, T, T],
    ),
    "never closes": ([0, 0, 0.2, 0, 0], [A, A, A, A, A]),
    "closes twice": (
        [0, 0.3, 1, 0, 0.2, 0, 0, 0, 0.9, 0],
        # Near both grips, touching goes before the next one.
        [A, P, G, R, R, R, A, A, G, R],
    ),
    "a grip that is not sustained": ([0, 0.6, 0.6, 0, 0], [A, A, A, A, A]),
    "closed to the end": ([0, 1, 1, 1], [A, G, G, G]),
    "touching too early": ([0.3, 0, 0, 0, 1], [A, A, A, A, G]),
}


@pytest.mark.parametrize("trace", TRACES)
def test_labels_of_scripted_gripper_traces(trace: str):
    closed, expected = TRACES[trace]
    padded = torch.tensor([[*closed, 1.0]])
    mask = torch.tensor([[True] * len(closed) + [False]])
    assert label_by_gripper(padded, mask).tolist() == [[*expected, NO_PHASE]]


def test_progress_is_in_fifths_of_the_rollouts_own_length():
    mask = torch.tensor([[True] * 10, [True] * 5 + [False] * 5, [True] + [False] * 9])
    labels = label_by_progress(torch.zeros(3, 10), mask)
    assert labels[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert labels[1].tolist() == [0, 1, 2, 3, 4] + [NO_PHASE] * 5
    assert labels[2].tolist() == [0] + [NO_PHASE] * 9
