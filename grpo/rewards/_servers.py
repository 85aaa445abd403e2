"""Judges that ask a server over HTTP: their settings, requests, retries and failures.

A request that fails never becomes a score: its rollouts are not judged, or the stage ends.
"""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from grpo.errors import GrpoError, ParameterError, RefusedError, ServerError, brief
from grpo.rewards._circuit import Circuit, CircuitSettings, Streak
from grpo.rewards.base import ROLLOUTS_PER_SHARD, Task, Unjudged, View
from grpo.schema import PARAMS, Timeout, VariableName, WithOptionalKeys

if TYPE_CHECKING:  # its import takes a tenth of a second, which `grpo check` does not need
    import httpx

IN_A_ROW = 16  # rollouts whose requests fail before the stage ends
MOST_WAIT_SECONDS = 60.0  # between two tries
MOST_BYTES = 2**24  # of a response
TOKEN = r"[A-Za-z0-9._~+/-]+=*"  # [RFC 6750]: what servers repeat of it can be found
REFUSALS = (401, 403, 404, 405, 407)  # statuses that another try does not change
OVERLOADS = (408, 425, 429, 502, 503, 504)  # statuses that may pass


def _require_http(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises if it is no number
    except ValueError:
        is_complete = False
    if not is_complete or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("must be an address http://HOST/PATH or https://HOST/PATH")
    if "@" in parts.netloc:
        raise ValueError("must have no user or password; name a key_variable instead")
    return url


class ServerSettings(WithOptionalKeys):
    """A server, and how often and how long it is asked."""

    url: Annotated[
        str, AfterValidator(_require_http)
    ]  # the whole address that requests are sent to
    # The environment variable that has the key; sent as `Authorization: Bearer KEY`. null: no key.
    key_variable: VariableName | None = None
    concurrency: Annotated[int, Field(gt=0, le=1024)]  # requests at a time, of each worker
    timeout_seconds: Timeout  # of one try
    retries: Annotated[int, Field(ge=0, le=100)]  # of a request that may succeed later
    # Before the first retry; doubles, up to MOST_WAIT_SECONDS. A longer Retry-After is obeyed.
    retry_seconds: Timeout
    circuit: CircuitSettings | None = None  # null: IN_A_ROW failures in a row end the stage


class RowServerSettings(ServerSettings):
    """A server that scores several rollouts per request."""

    rollouts_per_request: Annotated[int, Field(gt=0, le=ROLLOUTS_PER_SHARD)]


def waits(settings: ServerSettings) -> list[float]:
    """Returns the seconds before each retry: min(retry_seconds * 2^n, MOST_WAIT_SECONDS)."""
    return [
        min(settings.retry_seconds * 2**retry, MOST_WAIT_SECONDS)
        for retry in range(settings.retries)
    ]


class Kind(NamedTuple):
    """What follows from a failed try."""

    is_retried: bool
    # What ends the stage if it is the reason of IN_A_ROW rollouts in a row; None: nothing, because
    # the reason is in the rollout.
    error: type[GrpoError] | None
    may_be_one_rollout: bool  # of those of the request: they are asked alone then


UNREACHABLE = Kind(True, ServerError, False)
BROKEN = Kind(True, ServerError, True)
REFUSED = Kind(False, RefusedError, False)
UNSUITABLE = Kind(False, None, True)


class Failure(NamedTuple):
    """A request without a usable response."""

    kind: Kind
    detail: str
    wait_seconds: float = 0.0  # that the server asks for before another try
    streak: Streak | None = None  # that it belongs to, if the server may be down

    @property
    def is_outage(self) -> bool:
        """Whether its rollouts are not to blame."""
        opened = self.streak is not None and self.streak.opened
        return self.kind is UNREACHABLE or (self.kind is BROKEN and opened)


Result = View | Unjudged | Failure  # of a rollout


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that judges, with the key that it asks for."""

    where: str  # path of the judge's parameters
    settings: ServerSettings
    circuit: Circuit
    key: str | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """The url without its query, for messages."""
        return self.settings.url.partition("?")[0]

    def fail(self, kind: Kind, detail: str, *, wait_seconds: float = 0.0) -> Failure:
        """Returns a failure without the key."""
        return Failure(kind, self.without_key(detail), wait_seconds)

    def without_key(self, detail: str) -> str:
        """Returns what a server said, which may repeat the key."""
        return detail.replace(self.key, "***") if self.key else detail


class Client:
    """Sends the requests of one call of a judge."""

    def __init__(self, server: Server, http: "httpx.AsyncClient") -> None:
        self._server, self._http = server, http
        self._turns = asyncio.Semaphore(server.settings.concurrency)

    async def ask(self, body: object) -> object:
        """Returns the content of the response, which is JSON, or a Failure after all retries.

        While the circuit is open it returns a Failure at once.
        """
        # Held while it waits, so that a server with many failures gets fewer requests.
        async with self._turns:
            admission = self._server.circuit.admit()
            if admission == "no":
                return self._server.fail(UNREACHABLE, self._server.circuit.state)
            answer = last = await self._try(body)
            for seconds in waits(self._server.settings) if admission == "request" else []:
                if not (isinstance(last, Failure) and last.kind.is_retried):
                    break
                await asyncio.sleep(min(max(seconds, last.wait_seconds), MOST_WAIT_SECONDS))
                if self._server.circuit.is_open:  # by another request
                    break
                last = await self._try(body)
                # A request that makes a server crash gets a 500 and then, while it starts, 503s.
                if not (_is_of(BROKEN, answer) and _is_of(UNREACHABLE, last)):
                    answer = last
            is_failed = isinstance(answer, Failure) and answer.kind.is_retried
            streak = self._server.circuit.report(answered=not is_failed)
            return answer._replace(streak=streak) if isinstance(answer, Failure) else answer

    async def _try(self, body: object) -> object:
        # Imported here: see above.
        import httpx

        limit, fail = self._server.settings.timeout_seconds, self._server.fail
        try:
            async with asyncio.timeout(limit):
                status, content, retry_after = await self._post(body)
        except TimeoutError:
            return fail(BROKEN, f"no response within {limit:g} seconds")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # or no such host name
            return fail(UNREACHABLE, f"{type(error).__name__}: {error}")
        if not 200 <= status < 300:
            detail = f"HTTP {status} {content.decode(errors='replace')}"
            return fail(_kind_of(status), detail, wait_seconds=_read_seconds(retry_after))
        if len(content) > MOST_BYTES:
            return fail(UNSUITABLE, f"the response has more than {MOST_BYTES} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return fail(BROKEN, f"the response is no JSON: {content.decode(errors='replace')}")

    async def _post(self, body: object) -> tuple[int, bytes, str]:
        """Returns status, content and Retry-After.

        Of a content that is too long, it returns more than MOST_BYTES.
        """
        headers = {"Content-Type": "application/json"}
        if self._server.key:
            headers["Authorization"] = f"Bearer {self._server.key}"
        sent = json.dumps(body).encode()
        url = self._server.settings.url
        async with self._http.stream("POST", url, content=sent, headers=headers) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    break
            return response.status_code, bytes(content), response.headers.get("Retry-After", "")


def _is_of(kind: Kind, answer: object) -> bool:
    return isinstance(answer, Failure) and answer.kind is kind


Ask = Callable[[Client], Awaitable[list[Result]]]  # sends requests for some rollouts
Row = TypeVar("Row")  # a rollout and its task


def open_server(settings: ServerSettings, where: str) -> Server:
    """Returns the server that a judge's settings name, with its key.

    Args:
      where: Path of the judge's parameters, for messages.

    Raises:
      ParameterError: If the environment variable of the key is not set, or holds no key.
    """
    circuit = Circuit(settings.circuit)
    if settings.key_variable is None:
        return Server(where=where, settings=settings, circuit=circuit)
    key = os.environ.get(settings.key_variable, "").strip()
    if not re.fullmatch(TOKEN, key):
        raise ParameterError(
            f"{PARAMS}: {where}.settings.key_variable: the environment variable "
            f"{settings.key_variable} must hold the server's key, on every host that judges"
        )
    return Server(where=where, settings=settings, circuit=circuit, key=key)


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
    # Imported here: see above.
    import httpx

    connections = httpx.Limits(max_connections=server.settings.concurrency)
    # Timeouts are those of `Client`. Redirects are not followed: the key is for this server alone.
    async with httpx.AsyncClient(timeout=None, limits=connections, follow_redirects=False) as http:
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
    circuit = server.settings.circuit
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
        server.settings.circuit is not None and isinstance(result, Failure) and result.is_outage
    )
    status = result.status if isinstance(result, Unjudged) else "failed"
    return Unjudged(f"{server.address}: {result.detail}", "unanswered" if is_unanswered else status)


def _describe_outage(server: Server, failure: Failure, rollouts: str) -> str:
    return (
        f"{PARAMS}: {server.where}.settings.url: {server.address} gave no score for {rollouts}, "
        f"{brief(failure.detail)}; start the server or correct the settings, and rerun: what was "
        "judged before is kept"
    )


def _read_seconds(retry_after: str) -> float:
    """Returns the seconds of a Retry-After; 0 for a date, because clocks differ, and for others."""
    return float(retry_after) if re.fullmatch(r"\d{1,9}", retry_after) else 0.0


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


def _kind_of(status: int) -> Kind:
    if status in REFUSALS or status < 400:  # a redirect
        return REFUSED
    if status in OVERLOADS:
        return UNREACHABLE
    return BROKEN if status >= 500 else UNSUITABLE


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
