"""The judge that asks a server for the scores of several rollouts at a time."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from grpo.rewards._servers import (
    RowServerSettings,
    ask_about_rows,
    open_server,
    read_list,
    write_tasks,
)
from grpo.rewards.base import (
    ROLLOUTS_PER_SHARD,
    Judge,
    JudgeInputs,
    Reader,
    Task,
    Unjudged,
    View,
)
from grpo.runtime.servers import UNSUITABLE, Failure, Server

Rollout = tuple[str, Task]  # its text and its task


class RewardServerSettings(RowServerSettings):
    """A server of rewards, and the form of its requests and responses."""

    # columns: lists named as the columns of TRL's reward functions -> a list of scores.
    # openrlhf: query, prompts, labels -> {"rewards": scores}, as OpenRLHF's remote reward models.
    form: Literal["columns", "openrlhf"]


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge.

    Raises:
      ParameterError: If the server's key is not in the environment.
    """
    settings = inputs.settings
    assert isinstance(settings, RewardServerSettings)
    return read_by_server(settings, open_server(settings, inputs.where))


def read_by_server(settings: RewardServerSettings, server: Server) -> Reader:
    """Returns a judge whose raw scores are those of a server; see `ask_about_rows`."""
    write, read_response = {
        "columns": (write_columns, read_list),
        "openrlhf": (write_openrlhf, read_rewards),
    }[settings.form]
    ask = partial(
        ask_about_rows,
        server,
        write,
        read_response,
        rows_per_request=settings.rollouts_per_request,
    )

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View | Unjudged]:
        return ask([*zip(texts, tasks)])

    return read


def write_columns(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request of the form `columns`: lists of one item per rollout."""
    return {
        "completions": [text for text, _ in rollouts],
        **write_tasks([task for _, task in rollouts]),
    }


def write_openrlhf(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request of the form `openrlhf`."""
    return {
        "query": [task.prompt + text for text, task in rollouts],
        "prompts": [task.prompt for _, task in rollouts],
        "labels": [task.answer for _, task in rollouts],
    }


def read_rewards(server: Server, content: object) -> list[object] | Failure:
    """Returns the list of scores in a response of the form `openrlhf`."""
    match content:
        case {"rewards": [*scores]}:
            return scores
    return server.fail(UNSUITABLE, f'the response must be {{"rewards": [...]}}, is {content!r}')


JUDGE = Judge(
    reads="text",
    load=load,
    reads_together=True,
    rollouts_per_call=ROLLOUTS_PER_SHARD,
    settings=RewardServerSettings,
)
