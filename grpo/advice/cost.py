"""FLOPs of sampling and updating, expected per prompt from a profile's rollouts.

Scoring and training are counted by the passes `TokenPolicy` makes; sampling by a formula, scaled to
what the profile took. A test compares both with the policy's own count.
"""

from typing import NamedTuple

import numpy as np
import torch

from grpo.advice.facts import Facts, PassFlops
from grpo.advice.posterior import Floats, Ints
from grpo.modalities.shared.flops import Coefficients
from grpo.modalities.tokens.passes import body_passes, head_passes, total_flops
from grpo.training.batches import pack_microbatches

SEED = 0  # of the one draw of rollouts that is packed into microbatches


class TrainedGroups(NamedTuple):
    """How many rollouts of each prompt's group are trained on, and with what probability."""

    size: Ints
    chance: Floats

    @property
    def expected(self) -> Floats:
        """Rollouts of each prompt that are trained on."""
        expected: Floats = self.size * self.chance
        return expected


def sampling_flops(facts: Facts, rows: Ints, sizes: Ints, *, rollouts_per_batch: int) -> Floats:
    """Returns the FLOPs of sampling each prompt's group: the prompt once, then step by step.

    Scaled by what the profile took over what the same formula gives for the profile.
    """
    everything = np.arange(len(facts.profile))
    drawn = facts.profile["rollouts"].to_numpy()
    of_profile = _sampling(facts, everything, drawn, facts.rollouts_per_batch).sum()
    scale = facts.cost.flops / float(of_profile)
    return scale * _sampling(facts, rows, sizes, rollouts_per_batch)


def pass_flops(
    facts: Facts,
    rows: Ints,
    groups: TrainedGroups,
    *,
    parts: int,
    tokens_per_microbatch: int,
    is_training: bool,
) -> Floats:
    """Returns the FLOPs, per prompt, of one pass over what is trained on.

    One draw of rollouts is packed as training packs them; what padding costs and shared prompts
    save is spread over the prompts by the FLOPs of their rollouts alone.

    Args:
      parts: Into how many batches the groups are divided.
    """
    count = facts.flops.training if is_training else facts.flops.forward
    prompt, steps = _lengths(facts)
    alone = _mean_by_prompt(facts, _alone(count, prompt + steps - 1, steps))
    drawn = _draw(facts, rows, groups, parts)
    computed = spread = 0.0
    for part in range(parts):
        own = drawn[drawn[:, 0] == part]
        computed += packed_flops(facts.flops, own[:, 1:], tokens_per_microbatch, is_training)
        spread += float(alone[own[:, 1]].sum())
    result: Floats = groups.expected * alone[rows] * (computed / spread if spread else 1.0)
    return result


def packed_flops(
    flops: PassFlops, rollouts: Ints, tokens_per_microbatch: int, is_training: bool
) -> float:
    """Returns the FLOPs of a pass over rollouts in microbatches.

    Args:
      rollouts: Columns prompt (a number), prompt tokens and steps.
    """
    if len(rollouts) == 0:
        return 0.0
    widths = torch.from_numpy(rollouts[:, 1] + rollouts[:, 2])
    packed = pack_microbatches(widths, tokens_per_microbatch)
    return float(
        sum(_microbatch_flops(flops, rollouts[each.numpy()], is_training) for each in packed)
    )


def _microbatch_flops(flops: PassFlops, rollouts: Ints, is_training: bool) -> int:
    """Returns the FLOPs of one microbatch."""
    passes = body_passes(
        rollouts=len(rollouts),
        prompts=len(np.unique(rollouts[:, 0])),
        width=int(rollouts[:, 1].max()),
        steps=int(rollouts[:, 2].max()),
        may_share=flops.shares_prompts,
    )
    positions = int(rollouts[:, 2].sum())
    passes += head_passes(positions, flops.vocabulary, is_training=is_training)
    training = flops.training if is_training else None
    return total_flops(passes, forward=flops.forward, training=training)


def _draw(facts: Facts, rows: Ints, groups: TrainedGroups, parts: int) -> Ints:
    """Returns rollouts as training may get them: part, row of the profile, tokens, steps."""
    chooser = np.random.default_rng(SEED)
    counts = groups.size * (chooser.random(len(rows)) < groups.chance)
    # Without replacement: rollouts of one length share a microbatch, and so a prompt.
    steps = [
        np.resize(chooser.permutation(facts.steps_of(row)), count)
        for row, count in zip(rows.tolist(), counts.tolist())
    ]
    columns = (
        np.repeat(chooser.permutation(len(rows)) % parts, counts),
        np.repeat(rows, counts),
        np.repeat(facts.profile["prompt_tokens"].to_numpy()[rows], counts),
        np.concatenate(steps),
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _sampling(facts: Facts, rows: Ints, sizes: Ints, rollouts_per_batch: int) -> Floats:
    """Returns FLOPs by formula: T - 1 passes over one position for a rollout of T steps."""
    count = facts.flops.forward
    width = _padded_prompts(facts, rows, sizes, rollouts_per_batch)
    _, steps = _lengths(facts)
    passes = _mean_by_prompt(facts, steps - 1.0)[rows]
    looks = _mean_by_prompt(facts, steps * (steps - 1) / 2)[rows]  # back at its own steps
    prompt = count.body * width + count.attention * width**2 + count.head
    step_by_step = passes * (count.body + count.head) + count.attention * (passes * width + looks)
    result: Floats = prompt + sizes * step_by_step
    return result


def _padded_prompts(facts: Facts, rows: Ints, sizes: Ints, rollouts_per_batch: int) -> Floats:
    """Returns the width of each prompt in its batch; batches hold prompts of similar length."""
    tokens = facts.profile["prompt_tokens"].to_numpy()[rows]
    order = tokens.argsort(kind="stable")
    batch = (sizes[order].cumsum() - sizes[order]) // rollouts_per_batch
    widest = np.zeros(int(batch.max(initial=0)) + 1)
    np.maximum.at(widest, batch, tokens[order])
    width = np.empty(len(rows))
    width[order] = widest[batch]
    return width


def _alone(count: Coefficients, width: Floats, logits: Floats) -> Floats:
    """Returns the FLOPs of a row by itself."""
    width = width.astype(np.float64)
    flops: Floats = count.body * width + count.attention * width**2 + count.head * logits
    return flops


def _lengths(facts: Facts) -> tuple[Ints, Ints]:
    """Returns prompt tokens and steps of each rollout of the profile."""
    rows = facts.rollouts["row"].to_numpy()
    return facts.profile["prompt_tokens"].to_numpy()[rows], facts.rollouts["steps"].to_numpy()


def _mean_by_prompt(facts: Facts, value: Floats) -> Floats:
    """Returns the mean over each prompt's rollouts."""
    rows = facts.rollouts["row"].to_numpy()
    total = np.bincount(rows, weights=value, minlength=len(facts.profile))
    mean: Floats = total / np.bincount(rows, minlength=len(facts.profile))
    return mean
