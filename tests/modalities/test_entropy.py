"""Entropies of steps: exact, differentiable, and those of the distribution that was sampled."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from grpo.modalities.policy import Policy
from grpo.modalities.shared import logits as logits_module
from grpo.modalities.shared.logits import entropy_of, score_logits, score_tokens
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.objective.advantage import center_by_group_mean
from grpo.objective.base import Objective, chain
from grpo.objective.penalty import add_entropy_bonus
from grpo.objective.trust import clip_surrogate
from grpo.objective.weight import average_over_steps
from grpo.training.audits import needs_advantage
from grpo.training.metrics import UpdateMetrics, update_rows
from grpo.training.updates import Loss, run_update
from tests.modalities import test_seq2seq, test_vision_language
from tests.modalities.tiny import sampled_scores, seeded, tiny_policy
from tests.modalities.tiny_actor import SHAPE, tiny_actor
from tests.objective.batches import bare_terms
from tests.training.test_training import one_batch, sampled_round

ANSWERS = [3, 2]  # rollouts per prompt


@pytest.mark.parametrize("kept_logits", [2**26, 0], ids=["kept", "recomputed"])
def test_entropies_and_their_gradients_are_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int
):
    """d H / d z = -p (log p + H), beside the gradient of the log-prob, in float64."""
    monkeypatch.setattr(logits_module, "KEPT_LOGITS", kept_logits)
    monkeypatch.setattr(logits_module, "CHUNK_LOGITS", 15)  # three positions of five tokens
    head = nn.Linear(3, 5).double()
    hidden = torch.randn(4, 2, 3, dtype=torch.float64, generator=seeded(), requires_grad=True)
    tokens = torch.randint(5, (4, 2), generator=seeded())
    needed = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    weights = torch.randn(2, 4, 2, dtype=torch.float64, generator=seeded())
    logits, inputs = head(hidden), [hidden, head.weight, head.bias]
    log_softmax = (logits / 0.7).log_softmax(-1)
    plain = torch.where(needed, -(log_softmax.exp() * log_softmax).sum(-1), 0.0)
    logp = torch.where(needed, log_softmax.gather(2, tokens[..., None])[..., 0], 0.0)
    expected = torch.autograd.grad((weights[0] * logp + weights[1] * plain).sum(), inputs)
    for scores in (
        score_tokens(hidden, head, tokens, needed, 0.7, with_entropy=True),
        score_logits(head(hidden), tokens, needed, 0.7, with_entropy=True),
    ):
        assert scores.entropy is not None
        torch.testing.assert_close(scores.entropy.double(), plain, atol=1e-6, rtol=1e-6)
        total = (weights[0] * scores.logp + weights[1] * scores.entropy).sum()
        for ours, theirs in zip(torch.autograd.grad(total, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_the_gradient_of_the_entropy_is_that_of_finite_differences(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(logits_module, "KEPT_LOGITS", 0)  # several backward passes of one graph
    head, tokens = nn.Linear(3, 5).double(), torch.zeros(2, 1, dtype=torch.long)
    needed = torch.ones(2, 1, dtype=torch.bool)

    def entropy(hidden: Tensor) -> Tensor:
        found = score_tokens(hidden, head, tokens, needed, 0.7, with_entropy=True).entropy
        assert found is not None
        return found

    hidden = torch.randn(2, 1, 3, dtype=torch.float64, generator=seeded(), requires_grad=True)
    assert torch.autograd.gradcheck(entropy, hidden)


def test_uniform_tokens_have_the_entropy_log_n_and_impossible_ones_none():
    logits = torch.tensor([[0.0, 0, 0, 0], [0, -torch.inf, -torch.inf, 0]], requires_grad=True)
    entropy = entropy_of(logits.log_softmax(-1))
    torch.testing.assert_close(entropy, torch.tensor([4.0, 2.0]).log())
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(2, 4))


def capped_policy() -> TokenPolicy:
    """Returns a model that post-processes its logits, so that no head is found."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.3,
        final_logit_softcapping=5.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return TokenPolicy(
        Gemma2ForCausalLM(config).eval(),
        tokenizer,
        decoding=Decoding(temperature=0.7, max_steps=3),
        uses_chat_template=False,
    )


POLICIES: dict[str, Callable[[], Policy[Any]]] = {
    "tokens": lambda: tiny_policy(temperature=0.7, max_steps=3),
    "capped": capped_policy,
    "m2m100": lambda: test_seq2seq.policy_of("m2m100", temperature=0.7, max_steps=3),
    "marian": lambda: test_seq2seq.policy_of("marian", temperature=0.7, max_steps=3),
    "qwen": lambda: test_vision_language.policy_of("qwen", temperature=0.7, max_steps=3),
}


@pytest.mark.parametrize(
    "name",
    [
        *("tokens", "m2m100"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("capped", "marian", "qwen")),
    ],
)
def test_the_entropy_of_a_token_is_that_of_the_probabilities_of_all_tokens(name: str):
    """Each token in the place of the first one, by its log-prob."""
    policy = POLICIES[name]()
    prompts = test_vision_language.PROMPTS[:2] if name == "qwen" else ["one", "and two"]
    trajectory, _ = policy.sample(prompts, group_sizes=ANSWERS, generator=seeded())
    first = torch.zeros_like(trajectory.mask)
    first[:, 0] = True
    config: Any = policy.model.config
    with torch.no_grad():
        every = []
        for token in range(config.get_text_config().vocab_size):
            tokens = trajectory.tokens.clone()
            tokens[:, 0] = token
            every.append(policy.log_prob(replace(trajectory, tokens=tokens), first)[:, 0].double())
        scores = policy.step_log_probs(trajectory, first, with_entropy=True)
        plain = policy.step_log_probs(trajectory, first)
    logp = torch.stack(every, dim=-1)
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(5).double(), atol=1e-4, rtol=0)
    assert scores.entropy is not None
    assert plain.entropy is None
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(scores.entropy[:, 0].double(), expected, atol=1e-4, rtol=1e-4)
    assert not scores.entropy[:, 1:].any()
    assert torch.equal(scores.logp, plain.logp)


def test_the_entropy_of_a_chunk_is_the_sum_over_its_executed_tokens():
    """Each bin in the place of each token: a softmax over bins of the chunk's log-prob."""
    with tiny_actor(temperature=0.7) as actor, torch.no_grad():
        scenes = ["goes on | 0", "solves | 3"]
        trajectory, _ = actor.sample(scenes, group_sizes=ANSWERS, generator=seeded())
        entropy = actor.step_log_probs(trajectory, with_entropy=True).entropy
        expected = torch.zeros(trajectory.mask.shape)
        for token in range(SHAPE.length * SHAPE.actions):
            every = []
            for bin_ in range(SHAPE.bins):
                action = trajectory.action.clone()
                action[:, token] = bin_
                every.append(actor.log_prob(replace(trajectory, action=action)))
            was_done = token // SHAPE.actions < trajectory.executed
            of_token = entropy_of(torch.stack(every, dim=-1).log_softmax(-1))[trajectory.mask]
            expected[trajectory.mask] += of_token * was_done
    assert entropy is not None
    torch.testing.assert_close(entropy, expected, atol=1e-4, rtol=1e-4)


def test_the_bonus_is_subtracted_from_the_loss_on_the_mask():
    terms = replace(bare_terms(), loss=torch.tensor([[1.0]]), entropy=torch.tensor([[3.0]]))
    assert add_entropy_bonus(0.5).loss(terms).loss.item() == -0.5  # 1 - 0.5 * 3
    terms = bare_terms()
    assert add_entropy_bonus(0.0).loss(terms) is terms
    with pytest.raises(ValueError, match="add_entropy_bonus needs the entropy of steps"):
        add_entropy_bonus(0.5).loss(bare_terms())
    for wrong in (-0.1, float("inf")):
        with pytest.raises(ValueError, match="add_entropy_bonus needs a finite weight >= 0"):
            add_entropy_bonus(wrong)


def test_an_audit_knows_that_a_bonus_has_a_gradient_without_advantage():
    assert needs_advantage(clip_surrogate())
    assert not needs_advantage(chain(clip_surrogate(), add_entropy_bonus(0.1)))
    assert needs_advantage(chain(clip_surrogate(), add_entropy_bonus(0.0)))


def only_bonus(weight: float) -> Objective:
    return chain(
        center_by_group_mean(), average_over_steps(), clip_surrogate(), add_entropy_bonus(weight)
    )


def update(weight: float) -> tuple[UpdateMetrics, float, float]:
    """Returns the metrics of a step of SGD on equal rewards, and the mean entropy around it."""
    policy, rollouts, trajectory = sampled_round()
    flat = replace(rollouts, reward=torch.ones(len(rollouts.reward)))
    objective = only_bonus(weight)
    means = []

    def measure() -> None:
        with torch.no_grad():
            entropy = policy.step_log_probs(trajectory, with_entropy=True).entropy
        assert entropy is not None
        means.append(float(entropy[trajectory.mask].double().mean()))

    measure()
    metrics = run_update(
        Loss(
            policy=policy,
            objective=objective,
            trajectory=trajectory,
            proximal=sampled_scores(flat),
            reference=None,
            tokens_per_microbatch=64,
        ),
        one_batch(objective, flat),
        optimizer=torch.optim.SGD(policy.model.parameters(), lr=0.1),
        max_grad_norm=1e9,
        update=0,
    )
    measure()
    return metrics, means[0], means[1]


def test_with_equal_rewards_the_bonus_alone_raises_the_entropy():
    metrics, before, after = update(0.5)
    assert after > before + 0.01
    assert metrics.entropy_mean == pytest.approx(before, rel=1e-4)
    assert metrics.loss == pytest.approx(-0.5 * before, rel=1e-4)
    assert "entropy_mean" in update_rows([metrics])[0]


def test_without_weight_nothing_is_computed_or_recorded():
    metrics, before, after = update(0.0)
    assert before == after
    assert metrics.entropy_mean is None
    assert "entropy_mean" not in update_rows([metrics])[0]
