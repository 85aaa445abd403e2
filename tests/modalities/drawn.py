"""Rollouts of vLLM, as an engine or as a server, compared with those of the trainer's model."""

import torch

from grpo.modalities.modality import Lora
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from tests.modalities.tiny import seeded

TOLERANCE = 0.005  # nats per step, in float32; test failures of a wrong temperature are > 0.1
PROMPTS = ["What is 3 + 4?", "b", "c" * 150]  # the last one fills a block of 128 in the cache
SIZES = [3, 1, 4]
STEPS = 12
LORA = Lora(rank=2, alpha=8, dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])

Drawn = tuple[TokenTrajectory, torch.Tensor]  # with the log-probs of sampling


def decoding(temperature: float = 1.0, max_steps: int = STEPS) -> Decoding:
    return Decoding(temperature=temperature, max_steps=max_steps)


def draw(
    policy: TokenPolicy, prompts: list[str] = PROMPTS, sizes: list[int] = SIZES, seed: int = 0
) -> Drawn:
    return policy.sample(prompts, group_sizes=sizes, generator=seeded(seed))


def largest_difference(
    drawn: Drawn, trainer: TokenPolicy, settings: Decoding | None = None
) -> float:
    """Returns the largest difference of log-probs between vLLM and the trainer, in nats."""
    trainer.decoding = settings or decoding()
    with torch.no_grad():
        return float((trainer.log_prob(drawn[0]) - drawn[1]).abs().max())


def assert_same(drawn: Drawn, again: Drawn, tolerance: float = 0.0) -> None:
    assert torch.equal(drawn[0].tokens, again[0].tokens)
    assert torch.equal(drawn[0].mask, again[0].mask)
    torch.testing.assert_close(drawn[1], again[1], rtol=0.0, atol=tolerance)


def assert_rollouts_end_with_their_first_end_token(policy: TokenPolicy) -> None:
    policy.end_tokens = torch.arange(40)  # 40 of 259 tokens: some rollouts end early, some do not
    trajectory, _ = draw(policy, sizes=[20, 20, 20])
    steps = trajectory.mask.sum(dim=1)
    assert steps.min() < STEPS
    for row, count in zip(trajectory.tokens, steps):
        ended = torch.isin(row[:count], policy.end_tokens)
        assert not ended[:-1].any()
        assert bool(ended[-1]) or count == STEPS
    assert policy.is_finished(trajectory).any()
    assert not policy.is_finished(trajectory).all()
