"""What `grpo/advice/` asks of a modality: expected FLOPs of sampling and of training passes."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int


@runtime_checkable
class PassFlops(Protocol):
    """FLOPs of a policy's passes, from the lengths of prompts and rollouts alone."""

    def group_flops(
        self,
        width: Float[np.ndarray, " prompt"],
        sizes: Int[np.ndarray, " prompt"],
        *,
        mean_later_steps: Float[np.ndarray, " prompt"],
        mean_step_pairs: Float[np.ndarray, " prompt"],
    ) -> Float[np.ndarray, " prompt"]:
        """Returns the expected FLOPs of sampling each prompt's group.

        Args:
          width: Tokens that a prompt occupies in its batch, with padding.
          sizes: Rollouts of each prompt.
          mean_later_steps: Mean of T - 1 over rollouts of T steps.
          mean_step_pairs: Mean of T (T - 1) / 2.
        """
        ...

    def microbatch_flops(self, rollouts: Int[np.ndarray, "rollout 3"], *, is_training: bool) -> int:
        """Returns the FLOPs of a pass over one microbatch.

        Args:
          rollouts: Columns prompt (a number), prompt tokens and steps.
          is_training: True: forward and backward; False: forward without gradients.
        """
        ...

    def rollout_flops(
        self,
        prompt_tokens: Int[np.ndarray, " rollout"],
        steps: Int[np.ndarray, " rollout"],
        *,
        is_training: bool,
    ) -> Float[np.ndarray, " rollout"]:
        """Returns the FLOPs of a pass over each rollout without padding or shared prompts."""
        ...


@runtime_checkable
class CostModel(PassFlops, Protocol):
    """What a modality predicts about policies that start from one base policy."""

    @property
    def always_scores_proximal(self) -> bool:
        """Whether a single update, too, needs the log-probs of the proximal policy."""
        ...

    def count_tokens(self, prompts: list[str], /) -> list[int]:
        """Returns the number of tokens of each prompt, as the policy reads it."""
        ...

    def find_unlike_draws(self, draws: Any, profile_draws: Any) -> str | None:
        """Returns how an arm's draws differ from the profile's; None if they do not.

        The text goes on from the arm's name: "samples at temperature 1, the profile at 0.5".
        """
        ...
