"""The cost model against the counts of a policy for the same work."""

import numpy as np
import pandas as pd
import pytest
import torch
from profiles import COST_MODEL, synthetic_facts

from grpo.advice.facts import make_facts
from grpo.advice.prediction import (
    TrainedGroups,
    packed_flops,
    pass_flops,
    sampling_flops,
    sampling_scale,
)
from grpo.modalities.tokens.costs import TokenCostModel
from grpo.objective.algorithms import rloo
from grpo.training.batches import Batch
from grpo.training.frozen import compute_log_probs
from grpo.training.updates import Loss, add_gradient
from grpo.types import Cost, Credit
from tests.modalities.tiny import seeded, tiny_policy
from tests.training.test_training import sampled_round

SHORT_AND_LONG = ["a=", "bb=", "ccc=", "dddddddd=", "eeeeeeeeeeeeeeee="]


def cost_model_of(policy) -> TokenCostModel:
    return TokenCostModel(
        forward=policy.flops.forward,
        training=policy.flops.training,
        shares_prompts=policy.forward.can_share,
        vocabulary=policy.model.config.vocab_size,
        has_plain_head=policy.forward.has_plain_head,
        always_scores_proximal=False,
        count_tokens=lambda prompts: policy.encode(prompts)[1].sum(dim=1).tolist(),
    )


def lengths_of(trajectory) -> np.ndarray:
    """Returns prompt, prompt tokens and steps of each rollout."""
    tokens = trajectory.prompt_mask.sum(dim=1)[trajectory.group]
    return torch.stack([trajectory.group, tokens, trajectory.mask.sum(dim=1)], dim=1).numpy()


@pytest.mark.parametrize("head", ["plain", "of the model"])
@pytest.mark.parametrize("tokens", [10, 40, 10_000])
def test_passes_over_rollouts_cost_what_the_policy_counts(tokens: int, head: str):
    policy, rollouts, trajectory = sampled_round()
    if head != "plain":  # as with a model that scales or caps its logits
        policy.forward._head = None
    cost_model = cost_model_of(policy)
    policy.cost = Cost()
    scores = compute_log_probs(policy, trajectory, rollouts.mask.float(), tokens)
    expected = packed_flops(cost_model, lengths_of(trajectory), tokens, is_training=False)
    assert policy.cost.flops == expected
    policy.cost = Cost()
    credit = Credit(advantage=rollouts.mask.float(), weight=rollouts.mask.float())
    add_gradient(
        Loss(
            policy=policy,
            objective=rloo(),
            trajectory=trajectory,
            proximal=scores,
            reference=None,
            tokens_per_microbatch=tokens,
        ),
        Batch(rows=torch.arange(len(rollouts.group)), rollouts=rollouts, credit=credit),
        credit,
    )
    expected = packed_flops(cost_model, lengths_of(trajectory), tokens, is_training=True)
    assert policy.cost.flops == expected


def test_sampling_costs_what_the_policy_counts():
    """Predicted from 8 rollouts per prompt, for other sizes and other batches: within 3 %."""
    policy = tiny_policy(max_steps=5)
    cost_model = cost_model_of(policy)
    prompts = [text for text in SHORT_AND_LONG for _ in range(12)]
    ids = [f"p{i:02d}" for i in range(len(prompts))]
    policy.cost = Cost()
    trajectory, _ = policy.sample(prompts, group_sizes=[8] * len(ids), generator=seeded())
    steps = trajectory.mask.sum(dim=1).numpy()
    profile = pd.DataFrame(
        {
            "prompt_id": ids,
            "family": "f",
            "rollouts": 8,
            "successes": 4,
            "outcome_rate": 0.5,
            "mean_steps": steps.reshape(-1, 8).mean(axis=1),
            "solved_steps": steps.reshape(-1, 8).mean(axis=1),
        }
    )
    facts = make_facts(
        profile,
        pd.DataFrame({"prompt_id": np.repeat(ids, 8), "steps": steps}),
        prompt_tokens=dict(zip(ids, cost_model.count_tokens(prompts))),
        cost=policy.cost,
        rollouts_per_batch=10_000,
        cost_model=cost_model,
    )
    policy.cost = Cost()
    for text in SHORT_AND_LONG:  # batches of 24 rollouts hold prompts of one length
        policy.sample([text] * 12, group_sizes=[2] * 12, generator=seeded(1))
    sizes = np.full(len(ids), 2)
    found = sampling_flops(
        facts, np.arange(len(ids)), sizes, scale=sampling_scale(facts), rollouts_per_batch=24
    )
    assert found.sum() == pytest.approx(policy.cost.flops, rel=0.03)


def test_the_profile_costs_what_it_cost():
    facts = synthetic_facts()
    rows, sizes = np.arange(len(facts.profile)), facts.profile["rollouts"].to_numpy()
    per_batch = facts.rollouts_per_batch
    found = sampling_flops(
        facts, rows, sizes, scale=sampling_scale(facts), rollouts_per_batch=per_batch
    )
    assert found.sum() == pytest.approx(facts.cost.flops)


def test_a_pass_over_the_profiles_own_rollouts_costs_what_packing_them_costs():
    """All rollouts of all prompts: the one draw is nearly the whole. Within 3 %."""
    facts = synthetic_facts()
    rows = np.arange(len(facts.profile))
    tokens = facts.profile["prompt_tokens"].to_numpy()
    everything = np.stack(
        [
            facts.rollouts["row"].to_numpy(),
            np.repeat(tokens, 8),
            facts.rollouts["steps"].to_numpy(),
        ],
        axis=1,
    )
    expected = packed_flops(COST_MODEL, everything, 512, is_training=True)
    found = pass_flops(
        facts,
        rows,
        TrainedGroups(size=np.full(len(rows), 8), chance=np.ones(len(rows))),
        parts=1,
        tokens_per_microbatch=512,
        is_training=True,
    )
    assert found.sum() == pytest.approx(expected, rel=0.03)


def test_what_is_not_trained_on_costs_nothing():
    facts = synthetic_facts()
    rows = np.arange(len(facts.profile))
    groups = TrainedGroups(size=np.full(len(rows), 8), chance=np.zeros(len(rows)))
    found = pass_flops(facts, rows, groups, parts=4, tokens_per_microbatch=512, is_training=True)
    assert (found == 0).all()
