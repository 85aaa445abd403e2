"""Work of an iteration: rollout lengths, FLOPs of passes per rank, and seconds of sampling."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.scale.inputs import COMPUTED_BYTES, Assumed, Model, Run
from grpo.advice.prediction import packed_flops
from grpo.allocation.posterior import Floats, Ints
from grpo.modalities.costs import PassFlops
from grpo.modalities.shared.flops import Pass, total_flops
from grpo.training.batches import pack_microbatches

BISECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Passes distributed over ranks."""

    waves: int  # microbatches per rank
    slowest_flops: float  # sum over waves of the FLOPs of the largest microbatch


def draw_steps(count: int, *, mean: int, longest: int) -> Ints:
    """Returns rollout lengths: quantiles of min(exponential, longest) with a mean, shuffled.

    Raises:
      ValueError: If `mean` is not below `longest`.
    """
    if mean >= longest:
        raise ValueError(f"mean_steps must be below max_steps, {longest}, got {mean}")
    low, high = 1.0, 1e3 * longest
    for _ in range(BISECTIONS):  # for the mean of min(exponential, longest)
        scale = (low + high) / 2
        is_short = -scale * np.expm1(-longest / scale) < mean
        low, high = (scale, high) if is_short else (low, scale)
    quantiles = (np.arange(count) + 0.5) / count
    steps = np.clip(-low * np.log1p(-quantiles), 1, longest).round().astype(np.int64)
    drawn: Ints = np.random.default_rng(0).permutation(steps)
    return drawn


def trained_rollouts(run: Run, share: float) -> Ints:
    """Returns the trained rollouts of an iteration in the format of `packed_flops`."""
    groups = round(share * run.prompts_per_iteration)
    count = groups * run.rollouts_per_group
    steps = draw_steps(count, mean=run.mean_steps, longest=run.max_steps)
    prompt = np.repeat(np.arange(groups), run.rollouts_per_group)
    return np.stack([prompt, np.full(count, run.prompt_tokens), steps], axis=1)


def deal(
    flops: PassFlops, rollouts: Ints, run: Run, *, parts: int, is_training: bool
) -> list[Dealt]:
    """Returns the passes over each part of the rollouts; parts consist of whole groups."""
    part = rollouts[:, 0] * parts // (rollouts[:, 0].max() + 1)
    return [_deal(flops, rollouts[part == each], run, is_training) for each in range(parts)]


def _deal(flops: PassFlops, rollouts: Ints, run: Run, is_training: bool) -> Dealt:
    widths = torch.from_numpy(rollouts[:, 1] + rollouts[:, 2])
    packed = pack_microbatches(widths, run.tokens_per_microbatch)
    each = [
        packed_flops(flops, rollouts[rows.numpy()], run.tokens_per_microbatch, is_training)
        for rows in packed
    ]
    waves = [each[start : start + run.gpus] for start in range(0, len(each), run.gpus)]
    return Dealt(waves=len(waves), slowest_flops=sum(map(max, waves)))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One sampling engine: model, number of GPUs and assumptions about their speed."""

    model: Model
    gpus: int
    assumed: Assumed

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights in the sampler."""
        return self.model.parameters * COMPUTED_BYTES

    @property
    def cache_room(self) -> float:
        """Bytes available for the KV cache."""
        taken = self.assumed.gpu_memory_gb * self.assumed.engine_memory_share
        room = self.gpus * (taken - self.assumed.engine_workspace_gb) * 1e9
        return max(0.0, room - self.weight_bytes)

    def at_once(self, tokens: int) -> int:
        """Returns the number of rollouts of a length in tokens whose KV cache fits."""
        return int(self.cache_room // (self.model.cache_bytes * tokens))

    def step_seconds(self, contexts: Floats) -> float:
        """Returns the seconds of one decoding step by context length, from a roofline model."""
        moved = self.weight_bytes + self.model.cache_bytes * contexts.sum()
        count = self.model.flops.forward
        flops = len(contexts) * (count.body + count.head) + count.attention * contexts.sum()
        bandwidth = self.assumed.gpu_gb_per_second * 1e9 * self.assumed.decode_share
        return float(max(moved / bandwidth, flops / self.assumed.flops_per_second) / self.gpus)

    def read_seconds(self, prompts: int, tokens: int) -> float:
        """Returns the seconds of prefill, with each prompt read once."""
        each = Pass(rows=prompts, query=tokens, context=tokens, logits=1, is_training=False)
        flops = total_flops([each], forward=self.model.flops.forward, training=None)
        return flops / self.assumed.flops_per_second / self.gpus

    def decode_seconds(self, steps: Ints, *, prompt_tokens: int, at_once: int) -> float:
        """Returns the seconds of sampling rollouts with continuous batching.

        Args:
          steps: Length of every rollout, in the order of their start.
        """
        left, waiting, seconds = steps[:at_once].astype(float), steps[at_once:], 0.0
        done = np.zeros(len(left))
        while len(left):
            count = left.min()
            seconds += count * self.step_seconds(prompt_tokens + done + count / 2)
            goes_on = left > count
            left, done = left[goes_on] - count, done[goes_on] + count
            free = at_once - len(left)
            left = np.concatenate([left, waiting[:free]])
            done = np.concatenate([done, np.zeros(len(left) - len(done))])
            waiting = waiting[free:]
        return seconds


def sampling_seconds(engine: Engine, run: Run, *, prompts: int, group: int) -> float:
    """Returns the seconds in which engines on all GPUs sample a group per prompt.

    Raises:
      ValueError: If the KV cache of a rollout does not fit an engine.
    """
    engines = run.gpus // engine.gpus
    own = -(-prompts // engines)
    at_once = engine.at_once(run.prompt_tokens + run.mean_steps)
    if at_once == 0:
        raise ValueError(f"a sampler must have room for a rollout, has none on {engine.gpus} GPUs")
    steps = draw_steps(own * group, mean=run.mean_steps, longest=run.max_steps)
    decode = engine.decode_seconds(steps, prompt_tokens=run.prompt_tokens, at_once=at_once)
    return engine.read_seconds(own, run.prompt_tokens) + decode
