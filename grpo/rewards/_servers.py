"""Judges that ask a server over HTTP: their settings, and what becomes of failures.

A request that fails never becomes a score: its rollouts are not judged, or the stage ends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

from pydantic import Field

from grpo.errors import ServerError, brief
from grpo.rewards.base import ROLLOUTS_PER_SHARD, Task, Unjudged, View
from grpo.runtime.circuit import Circuit, CircuitSettings
from grpo.runtime.servers import (
    UNSUITABLE,
    Client,
    Failure,
    RequestSettings,
    Server,
    open_http,
    read_key,
)
from grpo.schema import PARAMS

IN_A_ROW = 16  # rollouts whose requests fail before the stage ends


class ServerSettings(RequestSettings):
    """A server that judges."""

    circuit: CircuitSettings | None = None  # null: IN_A_ROW failures in a row end the stage


class RowServerSettings(ServerSettings):
    """A server that scores several rollouts per request."""

    rollouts_per_request: Annotated[int, Field(gt=0, le=ROLLOUTS_PER_SHARD)]


Result = View | Unjudged | Failure  # of a rollout


Ask = Callable[[Client], Awaitable[list[Result]]]  # sends requests for some rollouts
Row = TypeVar("Row")  # a rollout and its task


def open_server(settings: ServerSettings, where: str) -> Server:
    """Returns the server that a judge's settings name, with its key.

    Args:
      where: Path of the judge's parameters, for messages.

    Raises:
      ParameterError: If the environment variable of the key is not set, or holds no key.
    """
    key = read_key(settings, f"{where}.settings")
    return Server(where=where, settings=settings, circuit=Circuit(settings.circuit), key=key)


def ask_server(server: Server, asks: Sequence[Ask], *, rollouts: int) -> list[View | Unjudged]:
    """Returns the results of all asks, in their order.

    Args:
      rollouts: Number of results.

    Raises:
      ServerError: If the server is down: IN_A_ROW rollouts in a row, or all, got no score, or with
        the setting `circuit.unanswered: end_stage` one of them.
      RefusedError: If it refuses them for a reason that is not in the rollouts, e.g. the key.
    """
    return asyncio.run(_ask_all(server, asks, min(IN_A_ROW, rollouts)))


async def _ask_all(server: Server, asks: Sequence[Ask], limit: int) -> list[View | Unjudged]:
    async with open_http(server.settings) as http:
        client = Client(server, http)
        tasks = [asyncio.ensure_future(ask(client)) for ask in asks]
        try:
            return await _collect(server, tasks, limit)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(
    server: Server, tasks: Sequence[Awaitable[list[Result]]], limit: int
) -> list[View | Unjudged]:
    """Returns the results in order; raises after `limit` failures in a row that end the stage."""
    circuit = server.circuit.settings
    results, in_a_row = list[Result](), 0
    for task in tasks:
        for result in await task:
            results.append(result)
            error = result.kind.error if isinstance(result, Failure) else None
            if circuit is not None and error is ServerError:
                error = None  # decided below, by the circuit
            in_a_row = in_a_row + 1 if error else 0
            if isinstance(result, Failure) and error and in_a_row >= limit:
                raise error(_describe_outage(server, result, f"{in_a_row} rollouts in a row"))
    outages = [each for each in results if isinstance(each, Failure) and each.is_outage]
    if circuit is not None and circuit.unanswered == "end_stage" and outages:
        raise ServerError(_describe_outage(server, outages[0], f"{len(outages)} rollouts"))
    return [_close(server, each) for each in results]


def _close(server: Server, result: Result) -> View | Unjudged:
    """Returns the result of a rollout for which nothing more is tried."""
    if isinstance(result, View):
        return result
    is_unanswered = (
        server.circuit.settings is not None and isinstance(result, Failure) and result.is_outage
    )
    status = result.status if isinstance(result, Unjudged) else "failed"
    return Unjudged(f"{server.address}: {result.detail}", "unanswered" if is_unanswered else status)


def _describe_outage(server: Server, failure: Failure, rollouts: str) -> str:
    return (
        f"{PARAMS}: {server.where}.settings.url: {server.address} gave no score for {rollouts}, "
        f"{brief(failure.detail)}; start the server or correct the settings, and rerun: what was "
        "judged before is kept"
    )


def ask_about_rows(
    server: Server,
    write: Callable[[Sequence[Row]], object],
    read: Callable[[Server, object], list[object] | Failure],
    rows: Sequence[Row],
    *,
    rows_per_request: int,
) -> list[View | Unjudged]:
    """Returns the results of rollouts that are sent in requests of several.

    If a request fails for a reason that may be in one of its rollouts, each is asked about alone.

    Args:
      write: Returns the request for some rollouts.
      read: Returns the items of a response, see `read_score`.

    Raises:
      ServerError, RefusedError: See `ask_server`.
    """
    parts = [
        rows[start : start + rows_per_request] for start in range(0, len(rows), rows_per_request)
    ]
    asks = [partial(_ask_rows, server, write, partial(read, server), each) for each in parts]
    return ask_server(server, asks, rollouts=len(rows))


def write_tasks(tasks: Sequence[Task]) -> dict[str, list[object]]:
    """Returns what a request says of tasks: lists of one item per rollout."""
    return {
        "prompts": [task.prompt for task in tasks],
        "answers": [task.answer for task in tasks],
        "families": [task.family for task in tasks],
        "entries": [task.entry for task in tasks],
    }


def read_list(server: Server, content: object) -> list[object] | Failure:
    """Returns the items of a response that is a list."""
    if isinstance(content, list):
        return content
    return server.fail(UNSUITABLE, f"the response must be a list of scores, is {content!r}")


async def _ask_rows(
    server: Server,
    write: Callable[[Sequence[Row]], object],
    read: Callable[[object], list[object] | Failure],
    rows: Sequence[Row],
    client: Client,
) -> list[Result]:
    """Returns the results of some rollouts that are sent in one request, or else each alone."""
    content = await client.ask(write(rows))
    scores = content if isinstance(content, Failure) else read(content)
    if isinstance(scores, list) and len(scores) != len(rows):
        scores = server.fail(UNSUITABLE, f"gave {len(scores)} scores for {len(rows)} rollouts")
    if isinstance(scores, list):
        return [read_score(server, each) for each in scores]
    if len(rows) == 1 or not scores.kind.may_be_one_rollout:
        return [scores] * len(rows)
    alone = [_ask_rows(server, write, read, [each], client) for each in rows]
    return [result for (result,) in await asyncio.gather(*alone)]


def read_score(server: Server, given: object) -> Result:
    """Returns the result for an item of a response: a score, or why there is none.

    Args:
      given: A number, or `{"status": "failed", "detail": "..."}`, whose status may also be
        "unparsable" or "timed_out".
    """
    match given:
        case {"status": "failed" | "timed_out" | "unparsable" as status, "detail": str(detail)}:
            return Unjudged(server.without_key(detail), status)
    if isinstance(given, bool) or not isinstance(given, int | float):
        return server.fail(UNSUITABLE, f"gave {given!r} as a score; it must be a number")
    try:
        return View(f"{given}", float(given))
    except (OverflowError, ValueError):  # of integers with hundreds of digits
        return server.fail(UNSUITABLE, "gave a score that is too large")
