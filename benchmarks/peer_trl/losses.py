"""Computes TRL's loss on given log-probs and writes it as a fixture of our tests.

PYTHON_OF_TRL -m benchmarks.peer_trl.losses    # writes tests/objective/trl_losses.json
"""

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_trl import workload
from benchmarks.peer_trl.workload import Scenario

OUT = Path(__file__).parents[2] / "tests" / "objective" / "trl_losses.json"
HORIZON = 7  # max_completion_length: dr_grpo divides by it
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
}


def main() -> None:
    """Computes loss and gradient of every case on the same tensors."""
    batch = make_batch()
    cases = {name: evaluate(settings, batch) for name, settings in CASES.items()}
    content = {
        "command": "PYTHON_OF_TRL -m benchmarks.peer_trl.losses",
        "trl": version("trl"),
        "horizon": HORIZON,
        "batch": {name: value.tolist() for name, value in batch.items()},
        "cases": cases,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")


def make_batch() -> dict[str, torch.Tensor]:
    """Returns 3 groups of 4 off-policy rollouts of 1 to HORIZON steps, some of them clipped."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 3, 1, 5, 2, 7, 4, 6, 6, 5, 7, 1])
    mask = torch.arange(HORIZON) < lengths[:, None]
    old = -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 0.1
    moved = 0.4 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    moved[4:8] *= 1e-3  # near the bounds of gspo
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0])
    return {
        "mask": mask,
        "proximal_logp": old * mask,
        "logp": (old + moved) * mask,
        "reward": reward.double(),
        "group": torch.arange(3).repeat_interleave(4),
    }


def evaluate(settings: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns loss and gradient w.r.t. log-probs by `GRPOTrainer._compute_loss`."""
    trainer = make_trainer(settings)
    logp = batch["logp"].clone().requires_grad_()
    mask, steps = batch["mask"], batch["mask"].shape[1]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logp,
        torch.zeros_like(logp),
        None,
    )
    rollouts = len(mask)
    inputs = {
        "prompt_ids": torch.ones(rollouts, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rollouts, 1, dtype=torch.long),
        "completion_ids": torch.ones(rollouts, steps, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages(trainer, batch),
        "old_per_token_logps": batch["proximal_logp"],
        "num_items_in_batch": mask.sum(),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert logp.grad is not None
    return {"settings": settings, "loss": float(loss.detach()), "gradient": logp.grad.tolist()}


def advantages(trainer: GRPOTrainer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the advantages of TRL: group z-score with ddof=1 and 1e-4 added to the deviation."""
    groups = batch["reward"].view(3, 4)
    centered = groups - groups.mean(dim=1, keepdim=True)
    if trainer.scale_rewards != "none":
        centered = centered / (groups.std(dim=1, keepdim=True) + 1e-4)
    return centered.flatten()


def make_trainer(settings: dict[str, Any]) -> GRPOTrainer:
    """Returns a trainer that only computes losses."""
    scenario = Scenario(size="0.1M", settings={})
    folder = tempfile.mkdtemp()
    return GRPOTrainer(
        model=workload.make_model(scenario.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            beta=0.0,
            num_generations=4,
            per_device_train_batch_size=12,
            max_completion_length=HORIZON,
            report_to="none",
            **settings,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": each} for each in workload.make_prompts(scenario)]
        ),
        processing_class=workload.make_tokenizer(scenario.model),
    )


if __name__ == "__main__":
    main()
