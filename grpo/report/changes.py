"""What changed on the evaluation prompts between two policies: counts by family and examples."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.report.listing import known_rounds, labeled, require_known
from grpo.report.samples import SOLVED
from grpo.report.terminal import align, wrap
from grpo.runtime.artifacts.tables import (
    EVALUATION,
    EVALUATION_SAMPLES,
    PROMPTS,
    read_table,
)

MOST_EXAMPLES = 5  # of rollouts that are right now, and of those that were
FAMILY_WIDTH = 40


def compare_rounds(artifacts: Path, before: str, after: str) -> str:
    """Returns which evaluation prompts `after` solves and `before` did not, and the reverse.

    A prompt is solved if its greedy rollout is right; without greedy rollouts, if at least half of
    its sampled ones are. Examples are rollouts with the same prompt and seed.

    Args:
      before: A round or `base`, as `after`.

    Raises:
      ParameterError: If one was not evaluated; the message names those that were.
      ArtifactError: If a table is missing or broken.
    """
    evaluations = artifacts / "evaluations"
    for name in (before, after):
        require_known("evaluated round", name, known_rounds(evaluations))
    tables = [read_table(evaluations / f"{each}.parquet", EVALUATION) for each in (before, after)]
    both = tables[0].merge(tables[1], on=["prompt_id", "family"], suffixes=(".before", ".after"))
    if both.empty:
        return f"{before} and {after} have no evaluation prompt in common"
    is_greedy = bool(both[["greedy.before", "greedy.after"]].notna().all(axis=None))
    solved = {each: _is_solved(both, each, is_greedy) for each in ("before", "after")}
    by_family = pd.DataFrame(
        {
            "family": both["family"],
            "prompts": 1,
            "fixed": ~solved["before"] & solved["after"],
            "broken": solved["before"] & ~solved["after"],
            "before": solved["before"],
            "after": solved["after"],
        }
    )
    counts = by_family.groupby("family").sum()
    whole = counts.sum()
    how = "by its greedy rollout" if is_greedy else "in at least half of its sampled rollouts"
    said = (
        f"{after} solves {whole['after']} of {whole['prompts']} evaluation prompts {how}, {before} "
        f"solved {whole['before']}: {whole['fixed']} are fixed and {whole['broken']} are broken."
    )
    titles = ["family", *counts.columns]
    rows = [[str(name), *map(str, row)] for name, row in zip(counts.index, counts.to_numpy())]
    table = align([titles, *rows], longest_first=FAMILY_WIDTH)
    return "\n\n".join([wrap(said), table, *_examples(artifacts, before, after)])


def _is_solved(both: pd.DataFrame, which: str, is_greedy: bool) -> "pd.Series[bool]":
    if is_greedy:
        return both[f"greedy.{which}"] == SOLVED
    return both[f"successes.{which}"] >= both[f"rollouts.{which}"] / 2


def _examples(artifacts: Path, before: str, after: str) -> list[str]:
    """Returns stored rollouts that were wrong and are right, and the reverse."""
    paths = [artifacts / "evaluations" / f"{each}.samples.parquet" for each in (before, after)]
    tables = [read_table(path, EVALUATION_SAMPLES) for path in paths]
    same = ["rollout_id", "prompt_id", "family", "prompt"]
    both = tables[0].merge(tables[1], on=same, suffixes=(".before", ".after"))
    gold = read_table(artifacts / "prompts" / "eval.parquet", PROMPTS)
    both = both.join(gold.set_index("prompt_id")["answer"], on="prompt_id")
    was, now = (both[f"outcome.{each}"] == SOLVED for each in ("before", "after"))
    fixed, broken = both[~was & now], both[was & ~now]
    said = [
        f"Of {len(both)} sampled rollouts whose texts are stored, {len(fixed)} are fixed and "
        f"{len(broken)} are broken."
    ]
    for word, rows in (("fixed", fixed), ("broken", broken)):
        said += [_example(word, row, paths) for row in rows.head(MOST_EXAMPLES).to_dict("records")]
    return said


def _example(word: str, row: Mapping[Hashable, Any], paths: Sequence[Path]) -> str:
    """Returns an example: what the judge read, or the file of a picture of which it read none."""
    texts = [
        str(row[f"text.{each}"]) or (f"not text: PNG in {path}" if row[f"image.{each}"] else "")
        for each, path in zip(("before", "after"), paths)
    ]
    return "\n".join(
        [
            f"{word}: {row['rollout_id']} ({row['family']})",
            labeled("prompt", str(row["prompt"])),
            labeled("reference", str(row["answer"])),
            labeled("before", texts[0]),
            labeled("after", texts[1]),
        ]
    )
