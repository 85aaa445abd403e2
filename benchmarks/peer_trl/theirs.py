"""Measures a scenario with TRL's GRPOTrainer in TRL's environment; prints JSON.

PYTHON_OF_TRL -m benchmarks.peer_trl.theirs '{"size": "3M", "settings": {"rows": 8}}'
"""

import json
import os
import sys
import tempfile
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_trl import workload
from benchmarks.peer_trl.workload import Clock, Scenario, now
from grpo.modalities.shared.flops import missing_flop_formulas


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Adds the CPU seconds of generation, and of scoring before the update, to `clock`."""

    clock: Clock

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        start = now()
        result = super()._generate_single_turn(*arguments, **named)
        self.clock.measure("generation", start)
        return result

    def _generate_and_score_completions(self, *arguments: Any, **named: Any) -> Any:
        start, generated = now(), self.clock.seconds.get("generation", 0.0)
        result = super()._generate_and_score_completions(*arguments, **named)
        self.clock.measure("scoring", start + self.clock.seconds["generation"] - generated)
        return result


class Steps(TrainerCallback):  # type: ignore[misc]
    """Times whole steps without the warm-up, whose first step is short."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trainer: TimedTrainer
        self.start = 0.0
        self.flops = 0
        self.counter = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_short = state.global_step == 0
        tokens = workload.WARMUP_TOKENS if is_short else workload.COMPLETION_TOKENS
        self.trainer.generation_config.max_new_tokens = tokens
        self.trainer.generation_kwargs["max_new_tokens"] = tokens
        if self.scenario.counts_flops:
            self.counter.__enter__()
        self.start = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.clock.measure("step", self.start)
        if self.scenario.counts_flops:
            self.counter.__exit__(None, None, None)
            self.flops += self.counter.get_total_flops()
        if state.global_step == self.scenario.warmups:
            self.trainer.clock.end_warmup()
            self.flops = 0


def main(scenario: Scenario) -> None:
    """Measures a scenario after its warm-up."""
    torch.set_num_threads(1)

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [
            workload.reward(tokens, prompt, scenario.uniform_fraction)
            for tokens, prompt in zip(completion_ids, prompts)
        ]

    steps = Steps(scenario)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=workload.make_model(scenario.model),
            reward_funcs=reward,
            args=config(scenario, folder),
            train_dataset=Dataset.from_list(
                [{"prompt": prompt} for prompt in workload.make_prompts(scenario)]
            ),
            processing_class=workload.make_tokenizer(scenario.model),
            callbacks=[steps],
        )
        trainer.clock, steps.trainer = Clock(), trainer
        weights = workload.sum_weights(trainer.model)
        start_bytes = workload.resident_bytes()
        trainer.train()
    seconds = trainer.clock.seconds
    seconds["update"] = seconds["step"] - seconds["generation"] - seconds["scoring"]
    measured = workload.summary(
        trainer.clock, scenario, start_bytes=start_bytes, weights=weights, flops=steps.flops
    )
    print(json.dumps(measured))


def config(scenario: Scenario, folder: str) -> GRPOConfig:
    """Returns TRL's configuration of the same update, with `scenario.settings` added."""
    total = workload.NUM_PROMPTS * workload.ROLLOUTS_PER_GROUP
    settings = dict(scenario.settings)
    rows = settings.pop("rows")
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="grpo",
        epsilon=workload.CLIP,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=workload.MAX_GRAD_NORM,
        num_generations=workload.ROLLOUTS_PER_GROUP,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=total // rows,
        max_completion_length=workload.COMPLETION_TOKENS,
        temperature=1.0,
        max_steps=scenario.warmups + scenario.model.measured_updates,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )


if __name__ == "__main__":
    main(workload.read_scenario(sys.argv[1]))
