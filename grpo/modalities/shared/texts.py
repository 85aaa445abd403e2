"""What policies whose rollouts are texts share: ends, decoding, draws, checks of stored tokens."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import ArtifactError
from grpo.modalities.shared.directories import save_base
from grpo.modalities.shared.logits import draw
from grpo.modalities.shared.packed import require_entries
from grpo.modalities.shared.warmup import BasePolicy, WarmupSettings, WarmupUpdate, with_remedy

# Exceptions of a model's code for inputs that its class does not support.
PASS_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
# Of log-probs, in nats. Rounding errors are far smaller, errors of masks or positions far larger.
TOLERANCES = {torch.float64: 0.02, torch.float32: 0.02, torch.float16: 0.2, torch.bfloat16: 1.0}
ROUNDING = 1e-4  # nats; tolerance for log-probs above 0
Pairs = list[tuple[str, str]]  # prompts and solutions


def decode_texts(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Int[Tensor, "rollout step"],
    mask: Bool[Tensor, "rollout step"],
) -> list[str]:
    """Returns each rollout's text without special tokens."""
    rows = [row[kept].tolist() for row, kept in zip(tokens, mask)]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts


def find_steps(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Int[Tensor, "rollout step"],
    mask: Bool[Tensor, "rollout step"],
    ends: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Returns the step that completes the first `end` characters of a rollout's text, per end.

    Found by bisection over the text of the first steps, which works for any tokenizer: a part of
    the bytes of a character does not complete it, and special tokens complete nothing.

    Args:
      ends: Per rollout, numbers of characters, at most those of its text.
    """

    def steps_of(row: list[int], text: str, wanted: Sequence[int]) -> list[int]:
        @cache
        def text_up_to(step: int) -> str:
            return str(tokenizer.decode(row[: step + 1], skip_special_tokens=True))

        def first_step(end: int) -> int:
            def completes(step: int) -> bool:
                return text_up_to(step)[:end] == text[:end]

            return bisect_left(range(len(row)), True, key=completes)

        return [first_step(end) for end in wanted]

    return [
        steps_of(row[kept].tolist(), text, wanted)
        for row, kept, text, wanted in zip(
            tokens, mask, decode_texts(tokenizer, tokens, mask), ends
        )
    ]


def has_ended(
    tokens: Int[Tensor, "rollout step"],
    mask: Bool[Tensor, "rollout step"],
    end_tokens: Int[Tensor, " token"],
) -> Bool[Tensor, " rollout"]:
    """Returns which rollouts ended with an end token instead of at the step limit."""
    last = mask.sum(dim=1, keepdim=True) - 1
    return torch.isin(tokens.gather(1, last)[:, 0], end_tokens)


class DrawnTexts(NamedTuple):
    """Rollouts up to the longest one, with their log-probs in nats at the temperature."""

    tokens: Int[Tensor, "rollout step"]
    mask: Bool[Tensor, "rollout step"]
    logp: Float[Tensor, "rollout step"]


class Advance(Protocol):
    """Reads a token of every rollout that goes on, and returns the logits of the next ones."""

    def __call__(
        self, step: int, chosen: Int[Tensor, " going"], going: Int[Tensor, " going"] | None
    ) -> Float[Tensor, "going token"]:
        """Returns the logits, on any device.

        Args:
          step: Of the token that is read.
          going: The rows that go on, of those in the last call; None: all of them.
        """


def draw_texts(
    logits: Float[Tensor, "rollout token"],
    advance: Advance,
    *,
    uniform: Float[Tensor, "rollout step"],
    end_tokens: Int[Tensor, " token"],
    temperature: float,
) -> DrawnTexts:
    """Returns rollouts of at most as many steps as `uniform` has; ended ones leave the batch.

    Sampling inverts the cumulative distribution at one uniform number per rollout and step, so a
    sample depends only on its number and its distribution.

    Args:
      logits: Of the first step.
    """
    rollouts, steps = uniform.shape
    tokens = torch.zeros(rollouts, steps, dtype=torch.long)
    mask = torch.zeros(rollouts, steps, dtype=torch.bool)
    logp = torch.zeros(rollouts, steps)
    alive: slice | Tensor = slice(None)  # a view, cheaper than an index until a rollout ends
    for step in range(steps):
        chosen, chosen_logp = draw_tokens(logits, uniform[alive, step], temperature)
        tokens[alive, step], logp[alive, step], mask[alive, step] = chosen, chosen_logp, True
        is_end = torch.isin(chosen, end_tokens)
        num_ended = int(is_end.sum())
        if step == steps - 1 or num_ended == len(chosen):
            break
        going = None
        if num_ended:
            going = fill_from_end(is_end)
            alive, chosen = torch.arange(rollouts)[alive][going], chosen[going]
        logits = advance(step, chosen, going)
    longest = int(mask.sum(dim=1).max())
    return DrawnTexts(tokens[:, :longest], mask[:, :longest], logp[:, :longest])


def fill_from_end(is_left_out: Bool[Tensor, " row"]) -> Int[Tensor, " kept"]:
    """Returns the rows that are kept; the last ones take the places of those that are left out.

    A cache then copies few rows. For [False, True, False, False] it returns [0, 3, 2].
    """
    kept = (~is_left_out).nonzero()[:, 0]
    count = len(kept)
    places = torch.arange(count)
    places[is_left_out[:count]] = kept[kept >= count]
    return places


def draw_tokens(
    logits: Float[Tensor, "rollout token"], uniform: Float[Tensor, " rollout"], temperature: float
) -> tuple[Int[Tensor, " rollout"], Float[Tensor, " rollout"]]:
    """Returns a sampled token per row and its log-prob, on the host; at temperature 0 the best."""
    if temperature > 0:
        return draw(logits, uniform, temperature)
    logp, chosen = logits.log_softmax(dim=1).max(dim=1)
    return chosen.cpu(), logp.cpu()


def require_text(tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Raises ArtifactError unless tokens are in the vocabulary and log-probs are at most 0."""
    for name, lengths in (("prompt_tokens", "prompt_lengths"), ("tokens", "steps")):
        known = (tensors[name] >= 0) & (tensors[name] < vocabulary)
        require_entries(tensors, name, known, f"in [0, {vocabulary})", lengths=lengths)
    logp = tensors["behavior_logp"]
    require_entries(tensors, "behavior_logp", logp <= ROUNDING, "a log-prob, at most 0")


def num_positions(config: PreTrainedConfig) -> int | None:
    """Returns the largest number of positions of a model; None: no limit, or scaled positions."""
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None) or {}
    # One setting, or one per type of layer.
    settings = [each for each in rotary.values() if isinstance(each, dict)] or [rotary]
    scales = any(each.get("rope_type", "default") != "default" for each in settings)
    if scales or getattr(text, "alibi", False):
        return None
    limit: int | None = getattr(text, "max_position_embeddings", None)
    return limit


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns the tokens that end a rollout, restricted to the model's vocabulary.

    Raises:
      ArtifactError: If eos_token_id is not a token id or a list of them.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    named = [
        *(configured if isinstance(configured, list) else [configured]),
        tokenizer.eos_token_id,
    ]
    if not all(each is None or type(each) is int for each in named):
        raise ArtifactError(
            f"{model.name_or_path}: eos_token_id of generation_config.json must be the number of a "
            f"token, or a list of them, got {configured!r}; correct it"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    return torch.tensor(sorted({each for each in named if each is not None and 0 <= each < rows}))


def base_of_texts(
    model: PreTrainedModel,
    tokenizer: Any,
    settings: WarmupSettings | None,
    warm_up: Callable[[PreTrainedModel, Any, Pairs, WarmupSettings], Iterator[WarmupUpdate]],
) -> BasePolicy:
    """Returns a base policy that is warmed up on prompts and solutions.

    Args:
      settings: None: an imported base, without a warm-up.
    """

    def train(table: pd.DataFrame) -> Iterator[WarmupUpdate]:
        pairs = list(zip(table["prompt"], table["solution"]))
        if settings is None:
            return iter(())
        return with_remedy(warm_up(model, tokenizer, pairs, settings), settings)

    return BasePolicy(
        num_updates=settings.updates if settings else 0,
        warm_up=train,
        save=partial(save_base, model=model, tokenizer=tokenizer),
    )
