"""What was trained of each phase, and how much its gradients differ: counted and by brute force."""

import pytest
import torch
from torch import Tensor

from grpo.modalities.action_chunks.phase_metrics import phase_metrics, profile_phases
from grpo.modalities.action_chunks.phases import PHASE_NAMES
from grpo.modalities.policy import make_rollouts
from grpo.objective.algorithms import pcm
from grpo.objective.base import assign_credit
from grpo.types import ActionChunks, Rollouts
from tests.modalities.tiny_actor import tiny_actor

NAMES = PHASE_NAMES["time"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand() -> Rollouts:
    """Returns a mixed group of four and a uniform one; phases 0 0 1 1, a chunk less in the 2nd."""
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[1, 3] = False
    phase = torch.tensor([0, 0, 1, 1]).expand(6, -1)
    outcome = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    action = torch.zeros(6, 4, 1)
    action[[0, 2], :2] = 3.0
    return Rollouts(
        group=torch.tensor([0, 0, 0, 0, 1, 1]),
        reward=outcome,
        outcome=outcome,
        mask=mask,
        behavior_logp=torch.zeros(6, 4),
        chunks=ActionChunks(torch.where(mask, phase, -1), action, mask[:, :, None]),
    )


def test_what_was_trained_of_a_phase_is_counted_by_hand():
    rollouts = by_hand()
    objective = pcm(tokens=1, budget=2)
    credit, state = assign_credit(objective, rollouts, objective.init(), seeded())
    rows = phase_metrics(rollouts, credit.weight != 0, state, NAMES)
    assert [row.phase for row in rows] == NAMES
    # The uniform group is not counted; one failure has one chunk of the second phase.
    assert [row.chunks for row in rows] == [8, 7, 0, 0, 0]
    assert sum(row.trained_chunks for row in rows) == 8
    # All actions of a phase are equal: the first differs by 3, nothing is taken off.
    assert rows[0].contrast == pytest.approx(3.0)
    assert rows[1].contrast == 0.0
    assert rows[2].contrast is None
    assert [row.keep for row in rows] == [1.0, 0.1, 0.1, 0.1, 0.1]
    kept = credit.weight != 0
    assert rows[0].trained_fraction_of_successes == float(kept[[0, 2], :2].double().mean())
    failures = torch.cat([kept[1, 2:3], kept[3, 2:]])
    assert rows[1].trained_fraction_of_failures == pytest.approx(float(failures.double().mean()))
    assert rows[2].trained_fraction_of_successes is None


def brute_force(gradients: list[Tensor]) -> float:
    """Returns the deviation of some vectors: the root of the trace of their covariance."""
    return float(torch.stack(gradients).var(dim=0, correction=0).sum() ** 0.5)


def test_the_deviation_of_gradients_is_that_of_autograd_chunk_by_chunk():
    with tiny_actor() as actor:
        # One that is solved at once and one that never is: a mixed group of the same scene.
        scenes = ["goes on | 0"]
        trajectory, logp = actor.sample(scenes, group_sizes=[4], generator=seeded())
        reward = torch.tensor([1.0, 0.0, 0.0, 1.0])
        rollouts = make_rollouts(
            trajectory, logp, group=trajectory.group, reward=reward, outcome=reward
        )
        found = profile_phases(actor, trajectory, rollouts, NAMES, seeded())
        again = profile_phases(actor, trajectory, rollouts, NAMES, seeded())
        assert found == again
        parameters = list(actor.model.parameters())
        by_phase: dict[int, list[Tensor]] = {}
        for row in range(4):
            for step in range(4):
                needed = torch.zeros(4, 4, dtype=torch.bool)
                needed[row, step] = True
                # z-scores of two successes and two failures are 1 and -1.
                score = actor.log_prob(trajectory, needed).sum() * (2 * reward[row] - 1)
                parts = torch.autograd.grad(score, parameters, allow_unused=True)
                flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, parts)]
                vector = torch.cat([each.flatten() for each in flat]).double()
                phase = int(trajectory.chunks.phase[row, step])
                by_phase.setdefault(phase, []).append(vector)
    rows = found["phases"]
    assert isinstance(rows, list)
    # Four chunks are in the first, second, third and fourth fifth: 5 k // 4.
    for number, row in enumerate(rows):
        if number in by_phase:
            assert row["gradient_deviation"] == pytest.approx(
                brute_force(by_phase[number]), rel=1e-4
            )
            assert row["chunks"] == 4
        else:
            assert row["gradient_deviation"] is None
    # Phases of as many chunks should share a budget as their gradients deviate.
    deviations = [row["gradient_deviation"] or 0.0 for row in rows]
    for row, deviation in zip(rows, deviations, strict=True):
        assert row["neyman_share"] == pytest.approx(deviation / sum(deviations))
    assert found["activation_bytes_per_chunk"] > 0
    norms = torch.stack([each.norm() for part in by_phase.values() for each in part])
    evenness = float(norms.mean() ** 2 / norms.square().mean())
    assert found["variance_by_gradient"] == pytest.approx(evenness, rel=1e-4)
