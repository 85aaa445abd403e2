"""The judge that asks a language model behind an OpenAI-compatible server for a score."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field

from grpo.rewards._servers import Result, ServerSettings, ask_server, open_server
from grpo.rewards.base import (
    ROLLOUTS_PER_SHARD,
    Judge,
    JudgeInputs,
    Reader,
    Task,
    Unjudged,
    View,
)
from grpo.runtime.chats import show_prompt
from grpo.runtime.servers import UNSUITABLE, Client, Failure, Server
from grpo.schema import Steps, require_one_group

FIELD = re.compile(r"\{(prompt|answer|completion)\}")


def _require_completion(template: str) -> str:
    if "{completion}" not in template:
        raise ValueError("must have {completion}, the place of the rollout's text")
    return template


Pattern = Annotated[str, AfterValidator(partial(require_one_group, what="the score"))]


class LlmSettings(ServerSettings):
    """A language model that judges. The url is the one of chat completions."""

    name: Annotated[str, Field(min_length=1)]  # of the model, as the server calls it
    # The message to the model. {prompt}, {answer} (the task's) and {completion} are replaced.
    template: Annotated[str, AfterValidator(_require_completion)]
    score_pattern: Pattern  # group 1 of its last match in the model's answer is the score
    max_tokens: Steps | None = None  # of the model's answer; null: the server decides


def load(inputs: JudgeInputs) -> Reader:
    """Returns the judge.

    Raises:
      ParameterError: If the server's key is not in the environment.
    """
    settings = inputs.settings
    assert isinstance(settings, LlmSettings)
    return read_by_llm(settings, open_server(settings, inputs.where))


def read_by_llm(settings: LlmSettings, server: Server) -> Reader:
    """Returns a judge whose raw score is what a language model writes about a rollout's text.

    It decodes greedily (temperature 0). Equal messages of a call are sent once, because rollouts of
    a group repeat texts.
    """

    def read(texts: Sequence[str], tasks: Sequence[Task]) -> list[View | Unjudged]:
        messages = [fill_template(settings.template, *each) for each in zip(texts, tasks)]
        distinct = list(dict.fromkeys(messages))
        asks = [partial(_ask, settings, server, each) for each in distinct]
        results = dict(zip(distinct, ask_server(server, asks, rollouts=len(distinct))))
        return [results[each] for each in messages]

    return read


def fill_template(template: str, text: str, task: Task) -> str:
    """Returns the message to the model; what a text has in braces is not replaced."""
    values = {"prompt": show_prompt(task.prompt), "answer": task.answer, "completion": text}
    return FIELD.sub(lambda found: values[found[1]], template)


async def _ask(settings: LlmSettings, server: Server, message: str, client: Client) -> list[Result]:
    body = {
        "model": settings.name,
        "messages": [{"role": "user", "content": message}],
        "temperature": 0.0,
        **({"max_tokens": settings.max_tokens} if settings.max_tokens else {}),
    }
    content = await client.ask(body)
    return [content if isinstance(content, Failure) else _read(settings, server, content)]


def _read(settings: LlmSettings, server: Server, content: object) -> Result:
    """Returns the score in a chat completion."""
    match content:
        case {"choices": [{"message": {"content": str(said)}}, *_]}:
            pass
        case _:
            return server.fail(UNSUITABLE, f"the response has no text of a message: {content!r}")
    found = re.findall(settings.score_pattern, said)
    if not found:
        return server.fail(UNSUITABLE, f"score_pattern matches nowhere in the answer {said!r}")
    try:
        score = float(found[-1])
    except ValueError:
        return server.fail(UNSUITABLE, f"gave {found[-1]!r} as a score; it must be a number")
    return View(said, score)


JUDGE = Judge(
    reads="text",
    load=load,
    reads_together=True,
    rollouts_per_call=ROLLOUTS_PER_SHARD,
    settings=LlmSettings,
)
