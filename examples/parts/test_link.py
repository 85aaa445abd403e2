import torch

import grpo
from plugins.my_part import my_part


def test_negative_advantages_are_multiplied():
    score = torch.tensor([1.0, 0.0])
    rollouts = grpo.Rollouts(
        group=torch.tensor([0, 0]),
        reward=score,
        outcome=score,
        mask=torch.ones(2, 1, dtype=torch.bool),
        behavior_logp=torch.zeros(2, 1),
    )

    def credit(objective: grpo.Objective) -> grpo.Credit:
        generator = torch.Generator().manual_seed(0)
        return grpo.assign_credit(objective, rollouts, objective.init(), generator)[0]

    plain, scaled = credit(grpo.rloo()), credit(grpo.chain(grpo.rloo(), my_part(0.5)))
    assert plain.advantage.tolist() == [[1.0], [-1.0]]
    assert scaled.advantage.tolist() == [[1.0], [-0.5]]
