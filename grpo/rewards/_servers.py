"""Judges that ask a server over HTTP: their settings, requests, retries and failures.

A request that fails never becomes a score: its rollouts are not judged, or the stage ends.
"""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from grpo.errors import GrpoError, ParameterError, RefusedError, ServerError, brief
from grpo.rewards.base import Unjudged, View
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
    retry_seconds: Timeout  # before the first retry; doubles, up to MOST_WAIT_SECONDS


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


Result = View | Failure  # of a rollout


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that judges, with the key that it asks for."""

    where: str  # path of the judge's parameters
    settings: ServerSettings
    key: str | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """The url without its query, for messages."""
        return self.settings.url.partition("?")[0]

    def fail(self, kind: Kind, detail: str) -> Failure:
        """Returns a failure; servers may repeat the key, details do not."""
        return Failure(kind, detail.replace(self.key, "***") if self.key else detail)


class Client:
    """Sends the requests of one call of a judge."""

    def __init__(self, server: Server, http: "httpx.AsyncClient") -> None:
        self._server, self._http = server, http
        self._turns = asyncio.Semaphore(server.settings.concurrency)

    async def ask(self, body: object) -> object:
        """Returns the content of the response, which is JSON, or a Failure after all retries."""
        # Held while it waits, so that a server with many failures gets fewer requests.
        async with self._turns:
            for seconds in waits(self._server.settings):
                answer = await self._try(body)
                if not isinstance(answer, Failure) or not answer.kind.is_retried:
                    return answer
                await asyncio.sleep(seconds)
            return await self._try(body)

    async def _try(self, body: object) -> object:
        # Imported here: see above.
        import httpx

        limit, fail = self._server.settings.timeout_seconds, self._server.fail
        try:
            async with asyncio.timeout(limit):
                status, content = await self._post(body)
        except TimeoutError:
            return fail(BROKEN, f"no response within {limit:g} seconds")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # or no such host name
            return fail(UNREACHABLE, f"{type(error).__name__}: {error}")
        if not 200 <= status < 300:
            return fail(_kind_of(status), f"HTTP {status} {content.decode(errors='replace')}")
        if len(content) > MOST_BYTES:
            return fail(UNSUITABLE, f"the response has more than {MOST_BYTES} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return fail(BROKEN, f"the response is no JSON: {content.decode(errors='replace')}")

    async def _post(self, body: object) -> tuple[int, bytes]:
        """Returns status and content; of a content that is too long, more than MOST_BYTES."""
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
            return response.status_code, bytes(content)


Ask = Callable[[Client], Awaitable[list[Result]]]  # sends requests for some rollouts


def open_server(settings: ServerSettings, where: str) -> Server:
    """Returns the server that a judge's settings name, with its key.

    Args:
      where: Path of the judge's parameters, for messages.

    Raises:
      ParameterError: If the environment variable of the key is not set, or holds no key.
    """
    if settings.key_variable is None:
        return Server(where=where, settings=settings)
    key = os.environ.get(settings.key_variable, "").strip()
    if not re.fullmatch(TOKEN, key):
        raise ParameterError(
            f"{PARAMS}: {where}.settings.key_variable: the environment variable "
            f"{settings.key_variable} must hold the server's key, on every host that judges"
        )
    return Server(where=where, settings=settings, key=key)


def ask_server(server: Server, asks: Sequence[Ask], *, rollouts: int) -> list[View | Unjudged]:
    """Returns the results of all asks, in their order.

    Args:
      rollouts: Number of results.

    Raises:
      ServerError: If IN_A_ROW rollouts in a row, or all, got no score, because the server is down.
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
    results, in_a_row = list[View | Unjudged](), 0
    for task in tasks:
        for result in await task:
            if isinstance(result, View):
                results.append(result)
                in_a_row = 0
                continue
            error = result.kind.error
            in_a_row = in_a_row + 1 if error else 0
            if error and in_a_row >= limit:
                raise error(_describe_outage(server, result, in_a_row))
            results.append(Unjudged(f"{server.address}: {result.detail}"))
    return results


def _describe_outage(server: Server, last: Failure, rollouts: int) -> str:
    return (
        f"{PARAMS}: {server.where}.settings.url: {server.address} gave no score for {rollouts} "
        f"rollouts in a row, {brief(last.detail)}; start the server or correct the settings, and "
        "rerun: what was judged before is kept"
    )


def _kind_of(status: int) -> Kind:
    if status in REFUSALS or status < 400:  # a redirect
        return REFUSED
    if status in OVERLOADS:
        return UNREACHABLE
    return BROKEN if status >= 500 else UNSUITABLE


def read_score(server: Server, given: object) -> Result:
    """Returns the result for a number in a response."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return server.fail(UNSUITABLE, f"gave {given!r} as a score; it must be a number")
    try:
        return View(f"{given}", float(given))
    except (OverflowError, ValueError):  # of integers with hundreds of digits
        return server.fail(UNSUITABLE, "gave a score that is too large")
