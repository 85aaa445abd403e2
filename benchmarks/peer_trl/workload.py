"""Model, prompts and rewards of both sides. Imports only torch and transformers."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_PROMPTS, ROLLOUTS_PER_GROUP = 8, 8
COMPLETION_TOKENS, WARMUP_TOKENS = 128, 8
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-5, 0.2, 1.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with tied embeddings and half as many key-value heads as heads."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    measured_updates: int  # of one process, after its warm-up


SIZES = {
    "0.1M": Size(
        vocabulary=512, hidden=64, intermediate=160, layers=2, heads=4, measured_updates=5
    ),
    "3M": Size(
        vocabulary=4096, hidden=192, intermediate=512, layers=5, heads=6, measured_updates=2
    ),
    "30M": Size(
        vocabulary=32000, hidden=384, intermediate=1024, layers=10, heads=6, measured_updates=1
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Workload and settings of one process."""

    size: str
    longest_prompt: int = 64  # tokens; prompts are at least three quarters as long
    uniform_fraction: float = 0.0  # fraction of groups whose rollouts are all right
    settings: dict[str, Any]  # "rows" per forward pass, and settings specific to the side
    full_warmups: int = 1  # unmeasured full updates: the first one allocates memory
    counts_flops: bool = False  # slows TRL's update, so that its time must not be used

    @property
    def model(self) -> Size:
        return SIZES[self.size]

    @property
    def warmups(self) -> int:
        """Number of warm-up updates: one of WARMUP_TOKENS, and `full_warmups`."""
        return 1 + self.full_warmups


def read_scenario(text: str) -> Scenario:
    """Returns the scenario that the command line has as JSON."""
    return Scenario(**json.loads(text))


def make_model(size: Size) -> LlamaForCausalLM:
    """Returns the model; both sides get the same random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """Returns a word-level tokenizer whose end token the model cannot sample.

    All rollouts therefore have COMPLETION_TOKENS steps on both sides.
    """
    words = {"<pad>": 0, "<bos>": 1, **{str(index): index for index in range(2, size.vocabulary)}}
    words["<eos>"] = size.vocabulary
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def make_prompts(scenario: Scenario) -> list[str]:
    """Returns prompts of a number, which `reward` reads, and random words."""
    generator = torch.Generator().manual_seed(1)
    longest, prompts = scenario.longest_prompt, []
    for index in range(NUM_PROMPTS):
        length = int(torch.randint(3 * longest // 4, longest + 1, (), generator=generator))
        words = torch.randint(2, scenario.model.vocabulary, (length - 1,), generator=generator)
        prompts.append(" ".join(map(str, [2 + index, *words.tolist()])))
    return prompts


def reward(tokens: list[int], prompt: str, uniform_fraction: float) -> float:
    """Returns a reward that differs between nearly all rollouts; 1 in uniform groups."""
    assert len(tokens) in {WARMUP_TOKENS, COMPLETION_TOKENS}, len(tokens)
    index = int(prompt.split()[0]) - 2
    if index < uniform_fraction * NUM_PROMPTS:
        return 1.0
    return sum(tokens) % 9973 / 9973


class Clock:
    """Sums CPU seconds of this process by part, after a warm-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()
        self.warmup_seconds = 0.0  # wall-clock time, because compilers run in other processes

    def end_warmup(self) -> None:
        """Discards all measurements."""
        self.warmup_seconds = time.perf_counter() - self.start
        self.seconds.clear()

    def measure(self, part: str, start: float) -> None:
        """Adds the CPU seconds since `start`, a value of `now`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + now() - start


def now() -> float:
    """Returns user and system CPU seconds of all threads of this process."""
    return time.process_time()


def peak_bytes() -> int:
    """Returns the peak resident set size of this process.

    Does not use getrusage, which inherits the peak of the parent process.
    """
    return _status("VmHWM")


def resident_bytes() -> int:
    """Returns the current resident set size of this process."""
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def summary(
    clock: Clock, scenario: Scenario, *, start_bytes: int, weights: float, flops: int
) -> dict[str, float]:
    """Returns CPU seconds and FLOPs per update, by part, and memory.

    Args:
      weights: Sum of absolute weights before any update, which must be equal on both sides.
      flops: Total of all measured updates; 0: not counted.
    """
    parts = {part: clock.seconds[part] for part in ("generation", "scoring", "update")}
    updates = scenario.model.measured_updates
    return {
        **{f"{part}_cpu_seconds": round(each / updates, 5) for part, each in parts.items()},
        "total_cpu_seconds": round(sum(parts.values()) / updates, 5),
        "warmup_seconds": round(clock.warmup_seconds, 1),
        "peak_bytes": peak_bytes(),
        "growth_bytes": peak_bytes() - start_bytes,
        "weights": round(weights, 6),
        **({"flops": flops // updates} if flops else {}),
    }


def sum_weights(model: torch.nn.Module) -> float:
    """Returns the sum of the absolute weights."""
    return float(sum(each.detach().double().abs().sum() for each in model.parameters()))
