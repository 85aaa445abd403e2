"""Synthetic profiles: prompts whose success rates are drawn from a Beta distribution."""

import numpy as np
import pandas as pd

from grpo.advice.facts import Facts, make_facts
from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.tokens.costs import TokenCostModel
from grpo.types import Cost

COST_MODEL = TokenCostModel(
    forward=Coefficients(body=1000, attention=2, head=100),
    training=Coefficients(body=3000, attention=7, head=300),
    shares_prompts=True,
    vocabulary=259,
    always_scores_proximal=False,
    count_tokens=lambda prompts: [len(each) for each in prompts],
)
DRAWN = 8  # rollouts per prompt


def synthetic_facts(prompts: int = 300, *, prior: tuple[float, float] = (0.5, 1.0)) -> Facts:
    """Returns the facts of prompts of 5 to 30 tokens whose rollouts take 1 to 20 steps."""
    chooser = np.random.default_rng(0)
    ids = np.array([f"p{i:04d}" for i in range(prompts)])
    successes = chooser.binomial(DRAWN, chooser.beta(*prior, size=prompts))
    longest = chooser.integers(2, 20, size=prompts)
    steps = chooser.integers(1, longest[:, None] + 1, size=(prompts, DRAWN))
    profile = pd.DataFrame(
        {
            "prompt_id": ids,
            "family": "f",
            "rollouts": DRAWN,
            "successes": successes,
            "outcome_rate": successes / DRAWN,
            "mean_steps": steps.mean(axis=1),
            "solved_steps": np.where(successes > 0, steps.mean(axis=1), np.nan),
        }
    )
    rollouts = pd.DataFrame({"prompt_id": np.repeat(ids, DRAWN), "steps": steps.ravel()})
    return make_facts(
        profile,
        rollouts,
        prompt_tokens=dict(zip(ids, chooser.integers(5, 30, size=prompts).tolist())),
        cost=Cost(flops=40_000_000, sampled_steps=int(steps.sum())),
        rollouts_per_batch=64,
        cost_model=COST_MODEL,
    )
