"""Whole updates of TRL's GRPOTrainer on the work of this benchmark; needs TRL."""

import os
import tempfile
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import time

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu.sizes import Target, make_model, make_prompts, make_words, reward_of


class Timer(TrainerCallback):  # type: ignore[misc]
    """Notes the seconds of every update, sampling included."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.target.synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.target.synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def seconds_of_updates(target: Target, model: str) -> list[float]:
    """Returns the seconds of every update; the first one is a warm-up.

    The weights are in bfloat16, as ours; TRL steps them without float32 copies.
    """
    work, timer = target.work, Timer(target)
    total = work.prompts * work.rollouts_per_group
    rows = min(total, work.tokens_per_microbatch // (work.prompt_tokens + work.max_steps))
    rows = next(each for each in range(rows, 0, -1) if total % each == 0)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward_of(tokens) for tokens in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=make_model(target, model),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=target.device == "cpu",
                bf16=True,
                gradient_checkpointing=False,
                beta=0.0,
                loss_type="grpo",
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                num_generations=work.rollouts_per_group,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=total // rows,
                max_completion_length=work.max_steps,
                temperature=1.0,
                max_steps=1 + work.repeats,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": prompt} for prompt in make_prompts(target, model)]
            ),
            processing_class=make_words(target, model),
            callbacks=[timer],
        )
        trainer.train()
    return timer.seconds
