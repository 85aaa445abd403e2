"""AdamW on weights that are coarser than its steps: what moves is what would move in float32."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from grpo.modalities.shared.optimizer import PreciseAdamW, optimized_tensors
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny import in_bfloat16, seeded
from tests.training.test_training import TRAINING, sampled_round, update_once

HOW = {"lr": 1e-6, "betas": (0.9, 0.99), "weight_decay": 0.1}
STEPS = 20


def drawn(dtype: torch.dtype) -> nn.Parameter:
    """Returns weights as large as models have them; the same in both precisions."""
    return nn.Parameter(torch.randn(1000, generator=seeded()).mul(0.02).bfloat16().to(dtype))


def train(optimizer: AdamW, weight: nn.Parameter) -> None:
    generator = seeded(1)
    for _ in range(STEPS):
        gradient = torch.randn(weight.shape, generator=generator).bfloat16().to(weight.dtype)
        optimizer.zero_grad()
        weight.backward(gradient)
        optimizer.step()


def test_weights_in_bfloat16_learn_what_they_learn_in_float32():
    exact, coarse, plain = drawn(torch.float32), drawn(torch.bfloat16), drawn(torch.bfloat16)
    start = exact.detach().clone()
    optimizer = PreciseAdamW([coarse], **HOW)
    train(AdamW([exact], **HOW), exact)
    train(optimizer, coarse)
    train(AdamW([plain], **HOW), plain)
    (copied,) = optimized_tensors(optimizer)
    assert torch.equal(copied, exact)
    assert (exact != start).all()
    assert torch.equal(coarse, exact.bfloat16())
    assert (plain != start.bfloat16()).float().mean() < 0.05  # torch's own: they stand still


def test_weights_in_float32_are_torchs_own():
    ours, torchs = drawn(torch.float32), drawn(torch.float32)
    optimizer = PreciseAdamW([ours], **HOW)
    assert optimized_tensors(optimizer)[0] is ours
    train(optimizer, ours)
    train(AdamW([torchs], **HOW), torchs)
    assert torch.equal(ours, torchs)


def test_gradients_of_microbatches_add_up_in_float32():
    weight = drawn(torch.bfloat16)
    optimizer = PreciseAdamW([weight], **HOW)
    for size in (1.0, 2**-10):  # in bfloat16 their sum is 1
        weight.backward(torch.full(weight.shape, size, dtype=torch.bfloat16))
    (copied,) = optimized_tensors(optimizer)
    assert weight.grad is None
    assert torch.equal(copied.grad, torch.full(weight.shape, 1 + 2**-10))
    optimizer.zero_grad()
    assert copied.grad is None


@pytest.mark.parametrize("largest", [1e9, 0.1], ids=["free", "clipped"])
def test_an_update_of_a_policy_in_bfloat16_is_that_in_float32(largest: float):
    """As near as eight bits of its passes allow: the norm within 5 %, the cosine above 0.95."""
    exact, rollouts, trajectory = sampled_round()
    coarse = in_bfloat16(exact)
    moved, norms = [], []
    for policy in (exact, coarse):
        optimizer = make_optimizer(policy.model, TRAINING)
        before = [each.detach().clone() for each in optimized_tensors(optimizer)]
        metrics = update_once(policy, rollouts, trajectory, optimizer=optimizer, largest=largest)
        after = optimized_tensors(optimizer)
        moved.append([b - a for a, b in zip(before, after)])
        norms.append(metrics.grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    ours, theirs = (torch.cat([each.flatten() for each in one]) for one in moved)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.95
