"""The judge that asks a server for the scores of several rollouts at a time."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from grpo.rewards._servers import (
    UNSUITABLE,
    Failure,
    Server,
    ServerSettings,
    ask_rows,
    ask_server,
    divide,
    open_server,
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

Rollout = tuple[str, Task]  # its text and its task


class RewardServerSettings(ServerSettings):
    """A server of rewards, and the form of its requests and responses."""

    # columns: lists named as the columns of TRL's reward functions -> a list of scores.
    # openrlhf: query, prompts, labels -> {"rewards": scores}, as OpenRLHF's remote reward models.
    form: Literal["columns", "openrlhf"]
    rollouts_per_request: Annotated[int, Field(gt=0, le=ROLLOUTS_PER_SHARD)]


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge.

    Raises:
      ParameterError: If the server's key is not in the environment.
    """
    settings = inputs.settings
    assert isinstance(settings, RewardServerSettings)
    return read_by_server(settings, open_server(settings, inputs.where))


def read_by_server(settings: RewardServerSettings, server: Server) -> Reader:
    """Returns a judge whose raw scores are those of a server; see `ask_rows`."""
    write = {"columns": write_columns, "openrlhf": write_openrlhf}[settings.form]
    ask = partial(ask_rows, server, write, partial(_read, settings, server))

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View | Unjudged]:
        rollouts, size = [*zip(texts, tasks)], settings.rollouts_per_request
        asks = [partial(ask, each) for each in divide(rollouts, size)]
        return ask_server(server, asks, rollouts=len(rollouts))

    return read


def write_columns(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request of the form `columns`: lists of one item per rollout."""
    return {
        "prompts": [task.prompt for _, task in rollouts],
        "completions": [text for text, _ in rollouts],
        "answers": [task.answer for _, task in rollouts],
        "families": [task.family for _, task in rollouts],
        "entries": [task.entry for _, task in rollouts],
    }


def write_openrlhf(rollouts: Sequence[Rollout]) -> dict[str, list[object]]:
    """Returns the request of the form `openrlhf`."""
    return {
        "query": [task.prompt + text for text, task in rollouts],
        "prompts": [task.prompt for _, task in rollouts],
        "labels": [task.answer for _, task in rollouts],
    }


def _read(
    settings: RewardServerSettings, server: Server, content: object
) -> list[object] | Failure:
    """Returns the list of scores in a response."""
    match settings.form, content:
        case "columns", [*scores]:
            return scores
        case "openrlhf", {"rewards": [*scores]}:
            return scores
    wanted = "a list of scores" if settings.form == "columns" else '{"rewards": [...]}'
    return server.fail(UNSUITABLE, f"the response must be {wanted}, is {content!r}")


JUDGE = Judge(
    reads="text",
    load=load,
    reads_together=True,
    rollouts_per_call=ROLLOUTS_PER_SHARD,
    settings=RewardServerSettings,
)
