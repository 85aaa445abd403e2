"""Devices, sizes of models and of work, and the models with random weights that parts share."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.peer_trl.workload import Size as Vocabulary
from benchmarks.peer_trl.workload import make_tokenizer
from grpo.modalities.tokens.policy import Decoding, TokenPolicy
from grpo.runtime.machine import prepare_machine
from grpo.schema import Machine

# Published shapes of Qwen2.5; weights are random, because a measured machine has no network.
QWEN = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
VOCABULARY = 151936
# For a run that only shows that the command works. The size of a head stays: vLLM supports few.
TINY_HEADS, WIDTH_DIVISOR, DEPTH_DIVISOR, TINY_VOCABULARY = 2, 16, 12, 1024
# Dense bfloat16 FLOPs per second on data sheets, by part of a device's name.
DATA_SHEETS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much is sampled and trained at a size."""

    prompts: int
    rollouts_per_group: int
    prompt_tokens: int
    max_steps: int
    tokens_per_microbatch: int
    repeats: int  # measured, after one that is not


WORK = {
    "full": Work(
        prompts=8,
        rollouts_per_group=16,
        prompt_tokens=128,
        max_steps=128,
        tokens_per_microbatch=8192,
        repeats=3,
    ),
    "tiny": Work(
        prompts=2,
        rollouts_per_group=4,
        prompt_tokens=16,
        max_steps=8,
        tokens_per_microbatch=128,
        repeats=2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and at which size a part runs."""

    device: Device
    size: str  # a key of WORK

    @property
    def work(self) -> Work:
        return WORK[self.size]

    def synchronize(self) -> None:
        """Waits for the device, so that a clock can be read."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prepare(self) -> None:
        """Configures torch as a stage does."""
        prepare_machine(Machine(device=self.device, dtype="bfloat16", threads=1, compile=False))


def shape_of(target: Target, model: str) -> dict[str, Any]:
    """Returns the fields of the configuration of a model of QWEN, divided if the size is tiny."""
    shape = {**QWEN[model], "vocab_size": VOCABULARY}
    if target.size == "tiny":
        head = shape["hidden_size"] // shape["num_attention_heads"]
        shape["hidden_size"] = TINY_HEADS * head
        shape["num_attention_heads"], shape["num_key_value_heads"] = TINY_HEADS, 1
        shape["intermediate_size"] //= WIDTH_DIVISOR
        shape["num_hidden_layers"] //= DEPTH_DIVISOR
        shape["vocab_size"] = TINY_VOCABULARY
    return {
        **shape,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def make_model(target: Target, model: str) -> Qwen2ForCausalLM:
    """Returns a model with random bfloat16 weights on the device."""
    torch.manual_seed(0)
    with torch.device(target.device):
        made = Qwen2ForCausalLM(Qwen2Config(**shape_of(target, model))).to(torch.bfloat16)
    return made.eval()


def make_words(target: Target, model: str) -> PreTrainedTokenizerFast:
    """Returns a word-level tokenizer whose end token the model cannot sample."""
    return make_tokenizer(
        Vocabulary(
            vocabulary=shape_of(target, model)["vocab_size"],
            hidden=0,
            intermediate=0,
            layers=0,
            heads=0,
            measured_updates=0,
        )
    )


def make_prompts(target: Target, model: str) -> list[str]:
    """Returns prompts of random words, each of `prompt_tokens` tokens."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(
        2,
        shape_of(target, model)["vocab_size"],
        (target.work.prompts, target.work.prompt_tokens),
        generator=generator,
    )
    return [" ".join(map(str, row)) for row in words.tolist()]


def make_policy(target: Target, model: str) -> TokenPolicy:
    """Returns a policy whose rollouts all have `max_steps` tokens."""
    return TokenPolicy(
        make_model(target, model),
        make_words(target, model),
        decoding=Decoding(temperature=1.0, max_steps=target.work.max_steps),
        uses_chat_template=False,
    )


def reward_of(tokens: list[int]) -> float:
    """Returns a reward that differs between nearly all rollouts."""
    return sum(tokens) % 9973 / 9973


def describe_device(target: Target) -> dict[str, Any]:
    """Returns the device's name, memory and data sheet's speed."""
    if target.device == "cpu":
        return {"name": "CPU", "memory_bytes": None, "data_sheet_flops": None, "count": 0}
    found = torch.cuda.get_device_properties(0)
    sheet = next((flops for part, flops in DATA_SHEETS.items() if part in found.name), None)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "data_sheet_flops": sheet,
        "count": torch.cuda.device_count(),
    }
