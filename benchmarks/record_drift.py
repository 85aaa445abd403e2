"""A link that writes the differences of log-probs in every microbatch of an update.

benchmarks.bfloat16 copies this file to plugins/ of its workspaces.
"""

from pathlib import Path

import torch

from grpo.objective.base import Objective, loss_link
from grpo.objective.link import Link
from grpo.runtime.artifacts.tensors import write_tensors
from grpo.types import StepTerms

FOLDER = Path(".work/drift")


def record_drift() -> Objective:
    """Writes both log ratios of each step, in nats and before any other link; changes nothing."""

    def loss(terms: StepTerms) -> StepTerms:
        # Other calls, such as that which measures the drift for rule U27, have no gradient.
        if terms.logp.requires_grad and terms.mismatch is not None:
            FOLDER.mkdir(parents=True, exist_ok=True)
            tensors = {
                "mask": terms.mask.to(torch.uint8),
                "trainer_proximal": terms.log_ratio.detach().float(),
                "proximal_behavior": terms.mismatch.detach().float(),
            }
            contents = {name: each.cpu().contiguous() for name, each in tensors.items()}
            write_tensors(FOLDER / f"{len([*FOLDER.iterdir()]):06d}.safetensors", contents)
        return terms

    return loss_link(Link("record_drift", {}), loss)
