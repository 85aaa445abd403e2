"""Your own prompts: one JSON object per line with "prompt", "answer" and an optional "family"."""

import json
from pathlib import Path

import pandas as pd

from grpo.errors import ArtifactError
from grpo.tasks.base import PromptTables


def read_prompts(*, train: Path, evaluation: Path, instruction: str, family: str) -> PromptTables:
    """Returns the prompts of two files, each followed by `instruction`; no warm-up.

    Args:
      family: Of lines that name none.

    Raises:
      ArtifactError: If a line is wrong, or a prompt stands in both files.
    """
    frames = {
        part: _read(path, part, instruction, family)
        for part, path in [("train", train), ("eval", evaluation)]
    }
    shared = set(frames["train"]["prompt"]) & set(frames["eval"]["prompt"])
    if shared:
        raise ArtifactError(
            f"{evaluation}: {len(shared)} prompts stand in {train} too, "
            f"the first is {min(shared)[:60]!r}; remove them from one file"
        )
    empty = pd.DataFrame(columns=["prompt_id", "family", "prompt", "solution"])
    return PromptTables(frames["train"], frames["eval"], empty)


def _read(path: Path, part: str, instruction: str, family: str) -> pd.DataFrame:
    """Returns one file's prompts under the schema PROMPTS."""
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: must be a JSON-lines file, {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            prompt, answer = item["prompt"], item["answer"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ArtifactError(
                f'{path}: line {number} must be {{"prompt": ..., "answer": ...}}, got {line[:60]!r}'
            ) from None
        rows.append(
            {
                "prompt_id": f"{part}-{number:06d}",
                "family": str(item.get("family", family)),
                "prompt": f"{prompt}{instruction}",
                "answer": str(answer),
                "entry": "{}",
            }
        )
    if not rows:
        raise ArtifactError(f"{path}: must have at least one prompt, got none")
    return pd.DataFrame(rows)
