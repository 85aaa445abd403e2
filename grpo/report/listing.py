"""Rollouts of a round as text: prompt, reference, what the policy wrote, what the judge read."""

from collections.abc import Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from grpo.errors import ParameterError, brief
from grpo.params.parameters import Parameters
from grpo.report.samples import SOLVED, visible
from grpo.report.terminal import wrap
from grpo.runtime.artifacts.stored_iterations import IterationFiles, first_iteration, iterations_of
from grpo.runtime.artifacts.tables import (
    PROMPTS,
    REWARDS,
    ROLLOUTS,
    SUMMARY,
    read_table,
)
from grpo.runtime.chats import show_prompt
from grpo.sampling.judging import find_answer

LABEL = "  {:<11}"
INDENT = " " * len(LABEL.format(""))

Kind = Literal["right", "wrong", "all"]


def list_rollouts(
    artifacts: Path,
    params: Parameters,
    name: str,
    *,
    family: str | None = None,
    kind: Kind = "all",
    limit: int,
) -> str:
    """Returns rollouts of a round's iterations, in the order of sampling.

    Args:
      family: Only rollouts of prompts of this family.
      kind: Only rollouts whose outcome is 1, or only the others.
      limit: Maximum number of rollouts.

    Raises:
      ParameterError: If the round, or the family in it, is unknown; the message names those known.
      ArtifactError: If a table is missing or broken.
    """
    require_known("round", name, known_rounds(artifacts / "rollouts"))
    path = artifacts / "prompts" / "train.parquet"
    prompts = read_table(path, PROMPTS).set_index("prompt_id")[["family", "prompt", "answer"]]
    found = pd.concat(_read(each, prompts) for each in _iterations(artifacts, name))
    if family is not None:
        require_known("family", family, found["family"].dropna().unique())
        found = found[found["family"] == family]
    is_right = found["outcome"] == SOLVED
    counts = f"{int(is_right.sum())} right, {int((~is_right).sum())} not"
    if kind != "all":
        found = found[is_right if kind == "right" else ~is_right]
    shown = found.head(limit)
    head = f"{name}: {len(is_right)} rollouts ({counts}), {len(shown)} shown"
    if len(shown) < len(found):
        head += f" of {len(found)}; --limit shows more"
    return "\n".join([head, *_describe(params, shown)])


def require_known(what: str, name: str, known: Collection[str]) -> None:
    """Raises ParameterError with the known names unless `name` is one of them."""
    if name not in known:
        names = ", ".join(sorted(known)) or "none yet; run dvc repro"
        raise ParameterError(f"{brief(name)}: is no {what} here; known: {names}")


def known_rounds(directory: Path) -> list[str]:
    """Returns the names of what lies in a directory of rounds: folders, or files with a table."""
    if not directory.is_dir():
        return []
    names = {each.name.partition(".")[0] for each in directory.iterdir()}
    return sorted(names - {""})


def _iterations(artifacts: Path, name: str) -> list[IterationFiles]:
    """Returns the files of all iterations, or of the first one if the round is not trained yet."""
    if (artifacts / "training" / name / SUMMARY).exists():
        return iterations_of(artifacts, name)
    return [first_iteration(artifacts, name)]


def _read(files: IterationFiles, prompts: pd.DataFrame) -> pd.DataFrame:
    """Returns the judged rollouts of an iteration with prompt, reference and place."""
    rollouts = read_table(files.table, ROLLOUTS)
    rewards = read_table(files.rewards, REWARDS).drop(columns="prompt_id")
    numbered = rollouts.assign(
        row=range(len(rollouts)), iteration=str(files), tensors=str(files.tensors)
    )
    return numbered.merge(rewards, on="rollout_id").join(prompts, on="prompt_id")


def _describe(params: Parameters, rollouts: pd.DataFrame) -> Iterator[str]:
    before = None
    for each in rollouts.to_dict("records"):
        if before != (each["iteration"], each["prompt_id"]):
            before = each["iteration"], each["prompt_id"]
            yield f"\n{each['prompt_id']} ({each['family']}, {each['iteration']})"
            yield labeled("prompt", show_prompt(each["prompt"]))
            yield labeled("reference", each["answer"])
        yield labeled(f"/{each['rollout_id'].rpartition('/')[2]}", _verdict(each))
        if params.modality.output_kind == "media":
            yield labeled("media", _place(each))
            continue
        yield labeled("text", each["text"])
        if params.reward.answer_pattern is not None:
            answer = find_answer(each["text"], params.reward.answer_pattern)
            yield labeled("judge read", "(no answer found)" if answer is None else answer)


def _place(rollout: Mapping[Hashable, Any]) -> str:
    """Returns where the media of a rollout lie; later iterations may be stored without them."""
    if not Path(rollout["tensors"]).exists():
        return "not text, and not stored"
    return f"not text: row {rollout['row']} of {rollout['tensors']}"


def _verdict(rollout: Mapping[Hashable, Any]) -> str:
    word = "right" if rollout["outcome"] == SOLVED else "wrong"
    cut = "" if rollout["is_finished"] else ", cut off"
    detail = f" ({rollout['detail']})" if rollout["detail"] else ""
    return f"{word}, reward {rollout['reward']:.3f}, {rollout['status']}{detail}{cut}"


def labeled(label: str, text: str) -> str:
    """Returns a label and a text beside it, wrapped, without control characters."""
    return wrap(f"{LABEL.format(label)} {_indented(visible(text))}", indent=f"{INDENT} ")


def _indented(text: str) -> str:
    return text.rstrip("\n").replace("\n", f"\n{INDENT} ")
