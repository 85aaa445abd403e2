"""The interface of cost models for `grpo/advice/`: expected FLOPs of sampling and training."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int


@runtime_checkable
class PassFlops(Protocol):
    """FLOPs of a policy's passes as functions of prompt and rollout lengths."""

    def group_flops(
        self,
        width: Float[np.ndarray, " prompt"],
        sizes: Int[np.ndarray, " prompt"],
        *,
        mean_later_steps: Float[np.ndarray, " prompt"],
        mean_step_pairs: Float[np.ndarray, " prompt"],
    ) -> Float[np.ndarray, " prompt"]:
        """Returns the expected FLOPs of sampling the group of each prompt.

        Args:
          width: Padded length of the prompt in its batch, in tokens.
          sizes: Number of rollouts per prompt.
          mean_later_steps: Mean of T - 1 over rollouts of T steps.
          mean_step_pairs: Mean of T (T - 1) / 2.
        """
        ...

    def microbatch_flops(self, rollouts: Int[np.ndarray, "rollout 3"], *, is_training: bool) -> int:
        """Returns the FLOPs of a pass over one microbatch.

        Args:
          rollouts: Columns: prompt id, number of prompt tokens, number of steps.
          is_training: True: forward and backward pass; False: forward pass without gradients.
        """
        ...

    def rollout_flops(
        self,
        prompt_tokens: Int[np.ndarray, " rollout"],
        steps: Int[np.ndarray, " rollout"],
        *,
        is_training: bool,
    ) -> Float[np.ndarray, " rollout"]:
        """Returns the FLOPs of one pass per rollout, without padding or shared prompts."""
        ...


@runtime_checkable
class CostModel(PassFlops, Protocol):
    """Cost predictions of a modality for policies that start from one base policy."""

    @property
    def always_scores_proximal(self) -> bool:
        """Whether even a single update needs the log-probs of the proximal policy."""
        ...

    def count_tokens(self, prompts: list[str], /) -> list[int]:
        """Returns the number of tokens of each prompt under the policy's tokenizer."""
        ...

    def find_decoding_mismatch(self, draws: Any, profile_draws: Any) -> str | None:
        """Returns how an arm's sampling settings differ from the profile's; None if equal.

        The text continues the arm's name: "samples at temperature 1, the profile at 0.5".
        """
        ...
