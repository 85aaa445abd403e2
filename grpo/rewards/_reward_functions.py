"""Reward functions of TRL's convention as judges: (prompts, completions, **columns) -> rewards."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpo.errors import ParameterError
from grpo.rewards.base import Judge, JudgeInputs, Reader, Task, View
from grpo.runtime.chats import read_chat

TEXTS = ("prompts", "completions")
OF_TRAINER = {"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
OF_EVERY_PROMPT = ("answer", "family")
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def judge_of_function(name: str, function: Callable[..., Any]) -> Judge:
    """Returns a judge that calls a reward function, which may be async.

    The function gets lists: the prompts, the texts of the rollouts as completions, and the columns
    that it has parameters for: answer, family and the entries of the prompts. With `**columns` it
    gets all of them. With `policy.prompt_format: chat`, prompts and completions are messages.

    Args:
      name: Of the judge, for messages.

    Raises:
      ParameterError: If it needs what only TRL's trainer has, or takes no completions by name.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters if each.kind in BY_NAME}
    required = {
        each.name
        for each in parameters
        if each.default is each.empty and each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    if required - named or not (takes_all or "completions" in named):
        raise ParameterError(
            f"{name}: must be a function (prompts, completions, **columns) -> rewards, "
            f"got {inspect.signature(function)}"
        )
    if required & OF_TRAINER:
        raise ParameterError(
            f"{name}: needs {min(required & OF_TRAINER)}, which only TRL's trainer has; judges get "
            "prompts, completions, answer, family and the columns of the prompts"
        )
    return Judge(
        reads="text",
        reads_together=True,
        may_fork=True,
        needs_columns=frozenset(required - {*TEXTS, *OF_EVERY_PROMPT}),
        load=partial(_load, function, named - OF_TRAINER, takes_all),
    )


def _load(
    function: Callable[..., Any], named: set[str], takes_all: bool, inputs: JudgeInputs
) -> Reader:
    """Returns the reader that calls a function.

    Args:
      named: The arguments that it names; a column that no prompt has is a list of None.
      takes_all: Whether it takes other columns, too.
    """

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View]:
        prompts: list[Any] = [each.prompt for each in tasks]
        completions: list[Any] = list(texts)
        if inputs.takes_messages:
            prompts = [read_chat(each) for each in prompts]
            completions = [[{"role": "assistant", "content": each}] for each in completions]
        missing = {name: [None] * len(texts) for name in named - {*TEXTS}}
        given = {**missing, "prompts": prompts, "completions": completions, **_columns(tasks)}
        passed = {key: each for key, each in given.items() if takes_all or key in named}
        rewards = function(**passed)
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_wait_for(rewards))
        return [View(_show(each), each) for each in rewards]

    return read


def _columns(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """Returns answers, families and the entries of prompts; None where a prompt has no such."""
    names = dict.fromkeys(name for each in tasks for name in each.entry)
    of_entries: dict[str, list[Any]] = {
        name: [each.entry.get(name) for each in tasks] for name in names
    }
    return of_entries | {
        "answer": [each.answer for each in tasks],
        "family": [each.family for each in tasks],
    }


async def _wait_for(rewards: Any) -> Any:
    return await rewards


def _show(reward: object) -> str:
    return f"{reward:.3f}" if isinstance(reward, float) else str(reward)
