"""Trains with TRL's GRPOTrainer in TRL's environment; prints its measurements as JSON.

PYTHON_OF_TRL -m benchmarks.peer_trl_run.theirs '{"workspace": "...", "out": "...", ...}'

Reads what the stages `prepare` and `base` of this project wrote. The fields of the order are those
of `Order`.
"""

import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import pyarrow.parquet as parquet
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_trl_run.judge import outcome_of


@dataclass(frozen=True, kw_only=True)
class Order:
    """A run: where its inputs and outputs are, the algorithm, and TRL's settings of speed."""

    workspace: str  # has artifacts/policies/base and artifacts/prompts
    out: str
    started: float  # time.time() at the start of this process
    seed: int
    updates: int
    prompts_per_update: int
    group_size: int
    learning_rate: float
    betas: list[float]
    max_grad_norm: float
    clip: list[float]  # low, high
    max_steps: int  # tokens of a rollout
    loss_type: str
    answer_pattern: str
    threshold: float
    updates_per_save: int  # 0: only the last policy is saved
    rollouts_file: str = ""  # for the tokens and rewards of all batches, if they are wanted
    settings: dict[str, Any] = field(default_factory=dict)  # "rows" per pass, others of GRPOConfig


class Judge:
    """TRL's reward function: the outcome of each rollout; notes the means of each batch."""

    __name__ = "reward"  # TRL names its metrics by it

    def __init__(self, order: Order) -> None:
        self.order = order
        self.rewards: list[float] = []  # mean of each batch
        self.steps: list[float] = []  # mean length of each batch
        self.batches: list[dict[str, Any]] = []  # if they are wanted

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        family: list[str],
        entry: list[str],
        **_: Any,
    ) -> list[float]:
        pattern, threshold = self.order.answer_pattern, self.order.threshold
        outcomes = [
            outcome_of(text, name, task, answer_pattern=pattern, threshold=threshold)
            for text, name, task in zip(completions, family, entry)
        ]
        self.rewards.append(sum(outcomes) / len(outcomes))
        self.steps.append(sum(map(len, completion_ids)) / len(completion_ids))
        if self.order.rollouts_file:
            self.batches.append(
                {"prompts": prompts, "answers": completion_ids, "rewards": outcomes}
            )
        return outcomes


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Notes the seconds of each update and saves weights; saving is not part of these seconds."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.paused_cpu = 0.0
        self.paused_wall = 0.0
        self.model: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        cpu, wall = time.process_time(), time.time()
        self.cpu.append(cpu - self.paused_cpu)
        self.wall.append(wall - self.order.started - self.paused_wall)
        every, done = self.order.updates_per_save, state.global_step
        if every and done % every == 0 and done < self.order.updates:
            self.model.save_pretrained(Path(self.order.out) / f"update-{done}")
            self.paused_cpu += time.process_time() - cpu
            self.paused_wall += time.time() - wall


def main(order: Order) -> None:
    """Trains, saves the last policy, and prints the seconds and rewards of every update."""
    torch.set_num_threads(1)
    artifacts = Path(order.workspace) / "artifacts"
    columns = ["prompt", "family", "entry"]
    rows = parquet.read_table(artifacts / "prompts" / "train.parquet", columns=columns).to_pylist()
    random.Random(order.seed).shuffle(rows)
    base = artifacts / "policies" / "base"
    judge, recorder = Judge(order), Recorder(order)
    settings = dict(order.settings)
    attention = settings.pop("attn_implementation", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation=attention
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=judge,
        args=config(order, settings),
        train_dataset=Dataset.from_list(rows[: order.updates * order.prompts_per_update]),
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[recorder],
    )
    recorder.model = model
    trainer.train()
    model.save_pretrained(Path(order.out) / f"update-{order.updates}")
    if order.rollouts_file:
        Path(order.rollouts_file).write_text(json.dumps(judge.batches))
    measured = {
        "cpu": [round(each, 3) for each in recorder.cpu],
        "wall": [round(each, 3) for each in recorder.wall],
        "reward": [round(each, 5) for each in judge.rewards],
        "steps": [round(each, 3) for each in judge.steps],
        "paused_cpu_seconds": recorder.paused_cpu,
        "paused_wall_seconds": recorder.paused_wall,
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    print(json.dumps(measured))


def config(order: Order, settings: dict[str, Any]) -> GRPOConfig:
    """Returns TRL's configuration: one on-policy update per batch, nothing logged or stored."""
    settings = dict(settings)
    rows = settings.pop("rows")
    total = order.prompts_per_update * order.group_size
    low, high = order.clip
    chosen: dict[str, Any] = {
        "output_dir": order.out,
        "seed": order.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": order.loss_type,
        "scale_rewards": "group",
        "epsilon": low,
        "epsilon_high": high,
        "learning_rate": order.learning_rate,
        "adam_beta1": order.betas[0],
        "adam_beta2": order.betas[1],
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": order.max_grad_norm,
        "num_generations": order.group_size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": total // rows,
        "max_completion_length": order.max_steps,
        "temperature": 1.0,
        "max_steps": order.updates,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**chosen, **settings})


if __name__ == "__main__":
    main(Order(**json.loads(sys.argv[1])))
