"""On the same log-probs, losses and gradients are those of TRL 1.16's GRPOTrainer.

The fixture holds inputs and TRL's outputs; `python -m benchmarks.peer_trl.losses` in TRL's
environment writes it. TRL divides by the deviation with n - 1 and 1e-4; where it adds up over
rollouts of different weight, so do we.
"""

import json
from pathlib import Path

import pytest
import torch

from grpo.objective.advantage import center_by_group_mean, scale_by_group_std
from grpo.objective.base import Objective, assign_credit, chain, loss_terms, scalar_loss
from grpo.objective.trust import (
    average_ratio_over_rollout,
    clip_surrogate,
    gate_ratio_softly,
    truncate_ratio,
)
from grpo.objective.weight import (
    average_over_horizon,
    average_over_rollouts,
    average_over_steps,
)
from grpo.types import Rollouts
from tests.modalities.tiny import seeded

FIXTURE = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
TRL_SCORE = chain(center_by_group_mean(), scale_by_group_std(ddof=1, epsilon=1e-4))
CHAINS: dict[str, Objective] = {
    "grpo": chain(TRL_SCORE, average_over_rollouts(), clip_surrogate(0.2, 0.2)),
    "dr_grpo": chain(
        center_by_group_mean(), average_over_horizon(FIXTURE["horizon"]), clip_surrogate(0.2, 0.2)
    ),
    "dapo": chain(TRL_SCORE, average_over_steps(), clip_surrogate(0.2, 0.28)),
    "cispo": chain(TRL_SCORE, average_over_steps(), truncate_ratio(5.0)),
    "sapo": chain(TRL_SCORE, average_over_rollouts(), gate_ratio_softly(1.0, 1.05)),
    "gspo": chain(
        TRL_SCORE,
        average_over_rollouts(),
        average_ratio_over_rollout(),
        clip_surrogate(3e-4, 4e-4),
    ),
}


def test_the_fixture_has_every_case():
    assert set(FIXTURE["cases"]) == set(CHAINS)


@pytest.mark.parametrize("name", CHAINS)
def test_loss_and_gradient_are_those_of_trl(name: str):
    """Within 1e-6 of the largest gradient; both in float64, our advantages in float32."""
    batch, case = FIXTURE["batch"], FIXTURE["cases"][name]
    mask = torch.tensor(batch["mask"])
    proximal_logp = torch.tensor(batch["proximal_logp"], dtype=torch.float64)
    reward = torch.tensor(batch["reward"])
    rollouts = Rollouts(
        group=torch.tensor(batch["group"]),
        reward=reward,
        outcome=reward,
        mask=mask,
        behavior_logp=proximal_logp,
    )
    credit, _ = assign_credit(CHAINS[name], rollouts, CHAINS[name].init(), seeded())
    logp = torch.tensor(batch["logp"], dtype=torch.float64, requires_grad=True)
    terms = loss_terms(
        CHAINS[name], logp=logp, proximal_logp=proximal_logp, reference_logp=None, credit=credit
    )
    loss = scalar_loss(terms, credit)
    loss.backward()
    expected = torch.tensor(case["gradient"], dtype=torch.float64)
    assert expected[mask].abs().max() > 0
    assert float(loss.detach()) == pytest.approx(case["loss"], abs=1e-6)
    assert logp.grad is not None
    assert (logp.grad - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_the_fixture_reaches_both_sides_of_the_clip(name: str):
    """Where TRL clips, the gradient is 0 though the advantage is not."""
    gradient = torch.tensor(FIXTURE["cases"][name]["gradient"])
    mask = torch.tensor(FIXTURE["batch"]["mask"])
    assert (gradient[mask] == 0).any()
    assert (gradient[mask] != 0).any()
