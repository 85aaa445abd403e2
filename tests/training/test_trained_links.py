"""Links on a real model: a sampler that is not the trainer, ranges within the drift, extremes."""

import pytest
import torch

from grpo.errors import UnsoundError
from grpo.objective.algorithms import rloo
from grpo.objective.base import Objective, chain
from grpo.objective.trust import (
    average_clipped_log_ratio,
    average_ratio_over_rollout,
    clip_surrogate,
    gate_ratio_softly,
    mask_mismatched_rollouts,
    truncate_mismatch,
    truncate_ratio,
)
from grpo.objective.weight import keep_extreme_rollouts
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import Scratch
from grpo.training.frozen import measure_drift
from grpo.training.metrics import UpdateMetrics
from grpo.training.updates import Iteration, run_updates
from grpo.types import Rollouts
from grpo.wiring.policies import make_optimizer
from grpo.wiring.rounds import located_in_objective
from tests.modalities.tiny import seeded
from tests.training.test_training import SIZES, TRAINING, one_batch, sampled_round, settings_of

SHIFT = 0.1  # nats by which the sampler underrates every step it took


def shifted(rollouts: Rollouts) -> Rollouts:
    """Returns rollouts whose sampler disagrees with the trainer."""
    return Rollouts(
        group=rollouts.group,
        reward=rollouts.reward,
        outcome=rollouts.outcome,
        mask=rollouts.mask,
        behavior_logp=rollouts.behavior_logp - SHIFT * rollouts.mask,
    )


def first_update(objective: Objective, *, is_shifted: bool) -> UpdateMetrics:
    """Trains a round and returns the metrics of its first update."""
    policy, rollouts, trajectory = sampled_round()
    scratch = Scratch("train", "links")
    trained = run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=shifted(rollouts) if is_shifted else rollouts,
            objective=objective,
            objective_state=objective.init(),
            optimizer=make_optimizer(policy.model, TRAINING),
            settings=settings_of(),
            first_update=0,
            generator=seeded(),
        ),
        scratch=scratch,
        progress=lambda done, total: None,
    )
    scratch.clear()
    return trained.metrics[0]


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_ratio_never_contains_the_samplers_mismatch():
    """U14: the trainer recomputes pi_old, so a weight for pi_old / mu counts nothing twice."""
    for objective in (rloo(0.9, 0.9), chain(truncate_mismatch(), rloo())):
        metrics = first_update(objective, is_shifted=True)
        assert metrics.ratio_min == pytest.approx(1, abs=1e-4)
        assert metrics.ratio_max == pytest.approx(1, abs=1e-4)
        assert metrics.clip_fraction == 0


def test_a_weight_scales_the_gradient_of_an_update():
    """Every step underrated by 0.1 nats: w = exp(0.1) everywhere, or the bound."""
    plain = first_update(rloo(), is_shifted=False)
    assert plain.mismatch_weight_mean is None
    assert plain.mismatch_masked_fraction is None
    for weight_max, expected in [(2.0, 1.10517), (1.05, 1.05)]:
        metrics = first_update(chain(truncate_mismatch(weight_max), rloo()), is_shifted=True)
        assert metrics.mismatch_weight_mean == pytest.approx(expected, abs=1e-4)
        assert metrics.mismatch_masked_fraction == 0
        assert metrics.grad_norm == pytest.approx(expected * plain.grad_norm, rel=1e-3)


def test_an_update_whose_rollouts_are_all_masked_has_no_gradient():
    mask = mask_mismatched_rollouts(0.99, 1.01, over="geometric_mean")
    metrics = first_update(chain(mask, rloo()), is_shifted=True)
    assert metrics.mismatch_masked_fraction == 1
    assert metrics.mismatch_weight_mean == 0
    assert metrics.grad_norm == 0


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (clip_surrogate(0.25, 0.9), clip_surrogate(0.35, 0.9)),
        (truncate_ratio(1.3), truncate_ratio(1.4)),
        (truncate_ratio(5.0, 0.8), truncate_ratio(5.0, 0.7)),
        (gate_ratio_softly(1.0, 6.0), gate_ratio_softly(1.0, 4.0)),
        (average_clipped_log_ratio(0.9, 0.25), average_clipped_log_ratio(0.9, 0.35)),
    ],
)
def test_every_region_within_three_times_the_drift_is_refused_by_name(
    narrow: Objective, wide: Objective
):
    """U27 at a drift of 0.1: log 1.3 = 0.26 and -log 0.8 = 0.22 are too narrow, log 1.4 is not."""
    _, rollouts, _ = sampled_round()
    batches = [one_batch(rloo(), shifted(rollouts))]
    for ratio in (chain(), average_ratio_over_rollout()):
        with pytest.raises(UnsoundError, match=f"U27: {narrow.links[0].name} needs a range"):
            measure_drift(chain(ratio, narrow), batches, rollouts.behavior_logp)
        drift = measure_drift(chain(ratio, wide), batches, rollouts.behavior_logp)
        assert drift == pytest.approx(SHIFT, abs=1e-3)
    corrected = chain(truncate_mismatch(), narrow)
    drift = measure_drift(corrected, batches, rollouts.behavior_logp)
    assert drift == pytest.approx(SHIFT, abs=1e-3)


def test_a_rule_that_shows_at_run_time_names_the_objective_in_the_parameters(request):
    params = read_params(request.config.rootpath / "params.yaml")
    arm = next(iter(params.arms))
    path = rf"params.yaml: arms.{arm}.objective: U27: clip_surrogate"
    with pytest.raises(UnsoundError, match=path), located_in_objective(arm):
        raise UnsoundError("U27: clip_surrogate needs a range")


def test_only_extreme_rollouts_are_trained_on():
    """Four groups, two rollouts of each."""
    _, rollouts, _ = sampled_round()
    batch = one_batch(chain(rloo(), keep_extreme_rollouts(2)), rollouts)
    kept = (batch.credit.weight != 0).any(dim=1)
    assert torch.bincount(batch.rollouts.group[kept]).tolist() == [2] * len(SIZES)
    metrics = first_update(chain(rloo(), keep_extreme_rollouts(2)), is_shifted=False)
    assert metrics.trained_rollouts in (2, 4, 6)  # the groups of the first of two batches
