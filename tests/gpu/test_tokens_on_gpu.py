"""The laws of the token policy and of an update on a GPU: run with `pytest -m gpu`."""

import pytest
import torch

from grpo.modalities.shared.logits import draw
from grpo.training.frozen import compute_log_probs
from tests.modalities.tiny import seeded, tiny_policy
from tests.training.test_training import sampled_round, update_once

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_log_probs_recomputed_on_a_gpu_equal_those_of_sampling_there():
    policy = tiny_policy()
    policy.model.to("cuda")
    trajectory, sampled = policy.sample(["a=", "bbb="], group_sizes=[3, 2], generator=seeded())
    scored = compute_log_probs(policy, trajectory, trajectory.mask.float(), 64).logp
    kept = trajectory.mask
    torch.testing.assert_close(scored[kept], sampled[kept], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_a_gpu_draws_the_tokens_of_the_cpu(vocabulary: int):
    logits = 3 * torch.randn(400, vocabulary, generator=seeded())
    logits[:, ::2] = -torch.inf  # never drawn
    uniform = torch.rand(400, dtype=torch.float64, generator=seeded())
    expected, expected_logp = draw(logits, uniform, 0.7)
    chosen, logp = draw(logits.to("cuda"), uniform, 0.7)
    assert bool((chosen % 2 == 1).all())
    # A draw differs where rounding moves an edge across its number: of 400, about 400 * 1e-5.
    assert int((chosen != expected).sum()) <= 2
    same = chosen == expected
    torch.testing.assert_close(logp[same], expected_logp[same], atol=1e-4, rtol=1e-4)


def test_an_update_on_a_gpu_is_that_on_the_cpu():
    losses, norms = [], []
    for device in ("cpu", "cuda"):
        policy, rollouts, trajectory = sampled_round()
        policy.model.to(device)
        metrics = update_once(policy, rollouts, trajectory)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
