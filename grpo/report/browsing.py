"""Data of the browser of rollouts: what every policy wrote for every evaluation prompt.

The first sampled rollout of each prompt, with the same seed for all policies.
"""

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.params.parameters import BASE
from grpo.report.reading import Run
from grpo.report.samples import SOLVED, visible
from grpo.runtime.artifacts.tables import FIRST_OUTCOME, FIRST_TEXT, PROMPTS, read_table
from grpo.runtime.chats import show_prompt

LARGEST_BYTES = 400_000  # of the data within the page; more prompts are in a page beside it

Shown = tuple[str, bool, int, int, int, int]  # see `show_rollout`


def read_prompts_to_browse(artifacts: Path, run: Run) -> dict[str, Any]:
    """Returns families, policies, and per prompt the rollout of each policy; JSON can hold it.

    Prompts are in turn of each family, so that a first part has all families. Without prompts if
    an evaluation was written before it kept first rollouts.

    Raises:
      ArtifactError: If the table of evaluation prompts is missing or broken.
    """
    policies = [BASE, *run.params.rounds]
    tables = {name: run.evaluated[name] for name in policies}
    if not all(FIRST_TEXT in each for each in tables.values()):
        return {"families": [], "policies": policies, "prompts": []}
    prompts = read_table(artifacts / "prompts" / "eval.parquet", PROMPTS).set_index("prompt_id")
    texts, answers = prompts["prompt"].to_dict(), prompts["answer"].to_dict()
    families = sorted(set(run.families))
    turn = run.families.groupby(run.families).cumcount()
    ordered = pd.DataFrame({"turn": turn, "family": run.families}).sort_values(["turn", "family"])
    pattern = run.params.reward.answer_pattern
    rollouts = [
        dict(zip(table.index, zip(table[FIRST_TEXT], table[FIRST_OUTCOME]), strict=True))
        for table in tables.values()
    ]

    def entry(identity: Hashable, family: str) -> dict[str, Any]:
        answer = visible(answers[identity])
        found = [each[identity] for each in rollouts]
        return {
            "family": families.index(family),
            "prompt": visible(show_prompt(texts[identity])),
            "answer": answer,
            "rollouts": [
                show_rollout(text, bool(outcome == SOLVED), answer, pattern)
                for text, outcome in found
            ],
        }

    shown = [entry(identity, str(family)) for identity, family in ordered["family"].items()]
    return {"families": families, "policies": policies, "prompts": shown}


def show_rollout(text: str, is_right: bool, reference: str, pattern: str | None) -> Shown:
    """Returns the visible text, whether it is right, and two ranges of characters.

    The first range is the answer: group 1 of the last match of `pattern`, or the whole text; -1 if
    there is none. The second one is where the answer of a wrong rollout differs from the reference:
    what is left without the beginning and the end that both share.
    """
    shown = visible(text)
    start, end = 0, len(shown)
    if pattern is not None:
        matches = list(re.finditer(pattern, shown))
        if not matches:
            return shown, is_right, -1, -1, -1, -1
        start, end = matches[-1].span(1)
    if is_right:
        return shown, True, start, end, start, start
    start_shared = _shared(shown[start:end], reference)
    rest, other = shown[start + start_shared : end], reference[start_shared:]
    end_shared = _shared(rest[::-1], other[::-1])
    return shown, False, start, end, start + start_shared, end - end_shared


def _shared(one: str, other: str) -> int:
    """Returns how many characters two texts have in common at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def first_part(data: Mapping[str, Any], largest_bytes: int) -> dict[str, Any]:
    """Returns the data with as many of the first prompts as take at most `largest_bytes`."""
    kept: Sequence[Any] = data["prompts"]
    sizes = accumulate(len(embed_json(each).encode()) for each in kept)
    return {**data, "prompts": kept[: sum(each <= largest_bytes for each in sizes)]}


def embed_json(content: Any) -> str:
    """Returns JSON that can stand in a script element of HTML: it has no `<`."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
