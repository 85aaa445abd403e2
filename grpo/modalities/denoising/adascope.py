"""AdaScope: chooses the noisy steps of each prompt by pilot rollouts. [arXiv 2605.15855]

A pilot is a rollout without noise. At some of its steps, the looks, the clean estimate x - sigma v
is judged. Structure has formed where its gain no longer changes; the reward has settled where it no
longer grows. The steps in between get noise.

The paper prints no thresholds and states a criterion that no number meets; this is a
reconstruction. Unlike the paper: the window belongs to a prompt, not to an image, and is measured
on separate pilots of the same policy. Measuring it on the trained rollouts would break the group's
baseline (rule U3). Structure is the correlation of the estimate with the pilot's final sample, not
CLIP's similarity to the caption.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from grpo.modalities.denoising.modality import Scope


class Pilots(NamedTuple):
    """The clean estimates of pilots at the looks."""

    steps: list[int]  # steps of the looks, ascending
    estimates: Float[Tensor, " look pilot *sample"]
    media: UInt8[Tensor, " look pilot *pixels"]
    final: Float[Tensor, " pilot *sample"]

    def structure(self) -> Float[Tensor, "look pilot"]:
        """Returns the correlation of each estimate with the pilot's final sample."""
        now, end = self.estimates.flatten(2), self.final.flatten(1)
        now, end = now - now.mean(dim=-1, keepdim=True), end - end.mean(dim=-1, keepdim=True)
        return torch.cosine_similarity(now, end.expand(now.shape), dim=-1)


def find_windows(
    structure: Float[Tensor, "look pilot"],
    preference: Float[Tensor, "look pilot"],
    steps: list[int],
    settings: Scope,
    num_steps: int,
) -> Int[Tensor, "pilot 2"]:
    """Returns the half-open window [first, end) of noisy steps for each pilot.

    Args:
      structure: Structure of the clean estimates at `steps`.
      preference: Rewards of the clean estimates.
      num_steps: Steps of the schedule; the last one never has noise.
    """
    found = [
        _find_window(*curves, steps, settings, num_steps)
        for curves in zip(structure.T.double(), preference.T.double())
    ]
    return torch.tensor(found)


def _find_window(
    structure: Float[Tensor, " look"],
    preference: Float[Tensor, " look"],
    steps: list[int],
    settings: Scope,
    num_steps: int,
) -> tuple[int, int]:
    gain = _smooth(structure.diff(), settings.smoothing)
    change = torch.cat([gain[:1], gain.diff()]).abs()
    formed = _first_run(
        change <= settings.structure_tolerance * gain.abs().max(),
        settings.first_look if gain.any() else len(gain),
        settings.patience,
    )
    start = round(settings.fallback[0] * num_steps) if formed is None else steps[formed]
    growth = _smooth(preference.diff(), settings.smoothing)
    after = next((look for look, step in enumerate(steps) if step > start), len(steps))
    settled = _first_run(
        growth <= settings.preference_tolerance * growth.max(),
        after if growth.max() > 0 else len(growth),
        settings.patience,
    )
    last = round(settings.fallback[1] * num_steps) if settled is None else steps[settled]
    start = min(start, num_steps - 2)
    return start, min(max(last, start) + 1, num_steps - 1)


def _smooth(gain: Float[Tensor, " look"], smoothing: float) -> Float[Tensor, " look"]:
    """Returns the moving average h_j = smoothing gain_j + (1 - smoothing) h_(j - 1)."""
    smoothed = gain.clone()
    for index in range(1, len(gain)):
        smoothed[index] = smoothing * gain[index] + (1 - smoothing) * smoothed[index - 1]
    return smoothed


def _first_run(holds: Tensor, start: int, length: int) -> int | None:
    """Returns the first index >= `start` at which `length` consecutive entries are True."""
    for index in range(start, len(holds) - length + 1):
        if bool(holds[index : index + length].all()):
            return index
    return None
