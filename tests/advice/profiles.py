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
    has_plain_head=True,
    always_scores_proximal=False,
    count_tokens=lambda prompts: [len(each) for each in prompts],
)
DRAWN = 8  # rollouts per prompt


def synthetic_facts(prompts: int = 300, *, prior: tuple[float, float] = (0.5, 1.0)) -> Facts:
    """Returns the facts of prompts of 5 to 30 tokens whose rollouts take 1 to 20 steps."""
    chooser = np.random.default_rng(0)
    successes = chooser.binomial(DRAWN, chooser.beta(*prior, size=prompts))
    longest = chooser.integers(2, 20, size=prompts)
    steps = chooser.integers(1, longest[:, None] + 1, size=(prompts, DRAWN))
    tokens = chooser.integers(5, 30, size=prompts)
    return facts_of(successes, steps, solved_steps=steps.mean(axis=1), prompt_tokens=tokens)


def facts_of(
    successes: np.ndarray, steps: np.ndarray, *, solved_steps: np.ndarray, prompt_tokens: np.ndarray
) -> Facts:
    """Returns the facts of a profile.

    Args:
      steps: A row per prompt, a column per rollout.
      solved_steps: Mean steps of a prompt's solved rollouts, ignored if it has none.
    """
    ids = np.array([f"p{i:04d}" for i in range(len(successes))])
    profile = pd.DataFrame(
        {
            "prompt_id": ids,
            "family": "f",
            "rollouts": DRAWN,
            "successes": successes,
            "outcome_rate": successes / DRAWN,
            "mean_steps": steps.mean(axis=1),
            "solved_steps": np.where(successes > 0, solved_steps, np.nan),
        }
    )
    return make_facts(
        profile,
        pd.DataFrame({"prompt_id": np.repeat(ids, DRAWN), "steps": steps.ravel()}),
        prompt_tokens=dict(zip(ids, prompt_tokens.tolist())),
        cost=Cost(flops=40_000_000, sampled_steps=int(steps.sum())),
        rollouts_per_batch=64,
        cost_model=COST_MODEL,
    )
