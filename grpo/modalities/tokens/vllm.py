"""Sampling by vLLM, an extra (pip install -e '.[vllm]'); needs a GPU.

The code follows vLLM's documented interface (0.11); this repository's tests have no GPU and do not
run it. vLLM's numerics differ from the trainer's: put `truncate_mismatch` before the trust region
(docs/methods/engine_mismatch.md). Sampling is seeded; results are reproducible only on the same
GPU, version and batch.
"""

import os
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Generator, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import MissingExtraError
from grpo.modalities.shared.flops import Pass
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.schema import PARAMS
from grpo.types import Cost

SHARE_OF_FREE_MEMORY = 0.9  # that an engine takes; vLLM's default is this share of all memory

try:
    import vllm
except ImportError:
    raise MissingExtraError(
        f"{PARAMS}: policy.sampler vllm needs vllm; run pip install -e '.[vllm]'"
    ) from None


def _free_memory() -> float:
    """Returns the share of the GPU's memory that is free: a trainer may keep weights on it."""
    free, total = torch.cuda.mem_get_info()
    return free / total


class WeightLoader:
    """What the engine's worker, of which this becomes a base class, can do beside vLLM's own."""

    model_runner: Any  # of vLLM's worker

    def load_file(self, path: str) -> None:
        """Loads the weights in a safetensors file into the engine's model."""
        self.model_runner.model.load_weights(load_file(path).items())


class VllmPolicy(TokenPolicy):
    """A token policy that samples with a vLLM engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        directory: Path,
        decoding: Decoding,
        uses_chat_template: bool,
    ) -> None:
        """Starts the engine.

        Args:
          model: A copy on the host for FLOP counts and end tokens; sampling does not use it.
          directory: Weights, configuration and tokenizer for the engine.
        """
        super().__init__(model, tokenizer, decoding=decoding, uses_chat_template=uses_chat_template)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no telemetry
        self._engine: Any = vllm.LLM(
            model=str(directory),
            dtype=str(model.dtype).removeprefix("torch."),
            seed=0,
            # Log-probs at the decoding temperature instead of those of the raw logits.
            logprobs_mode="processed_logprobs",
            worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__name__}",
            enable_sleep_mode=True,
            gpu_memory_utilization=SHARE_OF_FREE_MEMORY * _free_memory(),
        )
        self._sleeps = False

    def load_weights(self, path: Path) -> None:
        """Replaces the weights of the engine by those of a file; wakes an engine that sleeps."""
        if self._sleeps:
            self._engine.wake_up(tags=["weights"])
        self._engine.collective_rpc("load_file", args=(str(path),))
        if self._sleeps:
            self._engine.wake_up(tags=["kv_cache"])
        self._sleeps = False
        self._engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the memory of weights and cache; the engine stays, without weights."""
        self._engine.sleep(level=2)
        self._sleeps = True

    @torch.no_grad()
    def _sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        prompt, prompt_mask = self.encode(prompts)
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        outputs = self._engine.generate(
            [{"prompt_token_ids": row[kept].tolist()} for row, kept in zip(prompt, prompt_mask)],
            [self._settings(size, seed) for size, seed in zip(group_sizes, seeds)],
            use_tqdm=False,
        )
        drawn = [each for output in outputs for each in output.outputs]
        width = max(len(each.token_ids) for each in drawn)
        tokens = torch.zeros(len(drawn), width, dtype=torch.long)
        mask = torch.zeros(len(drawn), width, dtype=torch.bool)
        logp = torch.zeros(len(drawn), width)
        for row, each in enumerate(drawn):
            count = len(each.token_ids)
            chosen = zip(each.token_ids, each.logprobs)
            tokens[row, :count] = torch.tensor(each.token_ids)
            logp[row, :count] = torch.tensor([step[token].logprob for token, step in chosen])
            mask[row, :count] = True
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        trajectory = TokenTrajectory(
            group=group, prompt=prompt, prompt_mask=prompt_mask, tokens=tokens, mask=mask
        )
        self._count_sampling(trajectory)
        return trajectory, logp

    def _settings(self, size: int, seed: int) -> Any:
        return vllm.SamplingParams(
            n=size,
            temperature=self.decoding.temperature,
            max_tokens=self.decoding.max_steps,
            seed=seed,
            stop_token_ids=self.end_tokens.tolist(),
            logprobs=0,  # for the sampled token only
            detokenize=False,
        )

    def _count_sampling(self, trajectory: TokenTrajectory) -> None:
        """Adds the cost of cached sampling: each prompt once, then one position per step."""
        lengths = trajectory.prompt_mask.sum(dim=1)
        for length in lengths.tolist():
            self._count(Pass(rows=1, query=length, context=length, logits=1))
        read = trajectory.mask.sum(dim=1) - 1  # the last token is not an input
        for length, count in zip(lengths[trajectory.group].tolist(), read.tolist()):
            mean_context = length + (count + 1) / 2
            self._count(Pass(rows=count, query=1, context=round(mean_context), logits=1))
        self.cost += Cost(sampled_steps=int(trajectory.mask.sum()))
