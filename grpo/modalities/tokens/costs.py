"""Costs of a causal LM's sampling and training passes, for `grpo/advice/`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo.modalities.modality import RunParams
from grpo.modalities.policy import Policy
from grpo.modalities.shared.flops import Coefficients, total_flops
from grpo.modalities.tokens.forward import body_passes, head_passes, logits_passes
from grpo.modalities.tokens.modality import TokenPolicyParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, load_token_policy


@dataclass(frozen=True, kw_only=True)
class TokenPassFlops:
    """FLOPs of sampling and training passes of one model: a `PassFlops`."""

    forward: Coefficients
    training: Coefficients  # forward plus backward
    shares_prompts: bool  # whether the rollouts of a microbatch share one pass over their prompt
    vocabulary: int  # decides whether the backward pass recomputes logits
    has_plain_head: bool  # False: the model computes logits, also of padding

    def group_flops(
        self,
        width: Float[np.ndarray, " prompt"],
        sizes: Int[np.ndarray, " prompt"],
        *,
        mean_later_steps: Float[np.ndarray, " prompt"],
        mean_step_pairs: Float[np.ndarray, " prompt"],
    ) -> Float[np.ndarray, " prompt"]:
        """Returns the expected FLOPs of sampling the group of each prompt; see `PassFlops`.

        One pass reads the prompt for the whole group. A rollout of T steps then takes T - 1 passes
        over one position, which attends to the prompt and the rollout's earlier steps.
        """
        count = self.forward
        prompt = count.body * width + count.attention * width**2 + count.head
        attended = mean_later_steps * width + mean_step_pairs
        rollout = mean_later_steps * (count.body + count.head) + count.attention * attended
        flops: Float[np.ndarray, " prompt"] = prompt + sizes * rollout
        return flops

    def microbatch_flops(self, rollouts: Int[np.ndarray, "rollout 3"], *, is_training: bool) -> int:
        """Returns the FLOPs of `ForwardPasses.log_prob` for a microbatch; see `PassFlops`."""
        width, steps = (int(rollouts[:, column].max()) for column in (1, 2))
        if self.has_plain_head:
            passes = body_passes(
                rollouts=len(rollouts),
                prompts=len(np.unique(rollouts[:, 0])),
                width=width,
                steps=steps,
                may_share=self.shares_prompts,
            )
            positions = int(rollouts[:, 2].sum())
            passes += head_passes(positions, self.vocabulary, is_training=is_training)
        else:
            passes = logits_passes(rollouts=len(rollouts), width=width, steps=steps)
        training = self.training if is_training else None
        return total_flops(passes, forward=self.forward, training=training)

    def rollout_flops(
        self,
        prompt_tokens: Int[np.ndarray, " rollout"],
        steps: Int[np.ndarray, " rollout"],
        *,
        is_training: bool,
    ) -> Float[np.ndarray, " rollout"]:
        """Returns the FLOPs of one pass per rollout; see `PassFlops`."""
        count = self.training if is_training else self.forward
        width = (prompt_tokens + steps - 1).astype(np.float64)
        flops: Float[np.ndarray, " rollout"] = (
            count.body * width + count.attention * width**2 + count.head * steps
        )
        return flops


@dataclass(frozen=True, kw_only=True)
class TokenCostModel(TokenPassFlops):
    """The `CostModel` of a causal LM."""

    always_scores_proximal: bool  # True if the proximal pass records the routing to replay
    count_tokens: Callable[[list[str]], list[int]]

    def find_decoding_mismatch(self, draws: Decoding, profile_draws: Decoding) -> str | None:
        """Returns how the temperatures differ; None if they are equal."""
        if draws.temperature == profile_draws.temperature:
            return None
        return (
            f"samples at temperature {draws.temperature:g}, the profile at "
            f"{profile_draws.temperature:g}"
        )


def load_token_cost_model(
    params: RunParams[TokenPolicyParams], *, base: Path, policy: Policy[Any] | None
) -> TokenCostModel:
    """Returns the cost model of runs from the base policy in a directory.

    Args:
      policy: A TokenPolicy of the run; None: the base is loaded.

    Raises:
      ArtifactError: If a file is missing or broken.
    """
    routing = params.policy.routing
    decoding = Decoding(temperature=1.0, max_steps=params.policy.max_steps)
    loaded = policy or load_token_policy(params, base=base, directory=base, decoding=decoding)
    assert isinstance(loaded, TokenPolicy)

    def count_tokens(prompts: list[str]) -> list[int]:
        counts: list[int] = loaded.encode(prompts)[1].sum(dim=1).tolist()
        return counts

    return TokenCostModel(
        forward=loaded.flops.forward,
        training=loaded.flops.training,
        shares_prompts=loaded.forward.can_share and routing == "live",
        vocabulary=loaded.model.config.vocab_size,
        has_plain_head=loaded.forward.has_plain_head,
        always_scores_proximal=routing == "replay_proximal",
        count_tokens=count_tokens,
    )
