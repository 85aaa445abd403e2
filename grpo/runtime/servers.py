"""Requests to servers over HTTP: their settings, keys, retries and failures."""

import asyncio
import json
import os
import re
import ssl
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from grpo.errors import GrpoError, ParameterError, RefusedError, ServerError
from grpo.runtime.circuit import Circuit, Streak
from grpo.schema import PARAMS, Timeout, VariableName, WithOptionalKeys

if TYPE_CHECKING:  # its import takes a tenth of a second, which `grpo check` does not need
    import httpx

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


class RequestSettings(WithOptionalKeys):
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


def waits(settings: RequestSettings) -> list[float]:
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


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, with the key that it asks for."""

    where: str  # path of the parameters that name it
    settings: RequestSettings
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
    """Sends the requests of one call of a judge or sampler."""

    def __init__(self, server: Server, http: "httpx.AsyncClient") -> None:
        self.server, self._http = server, http
        self._turns = asyncio.Semaphore(server.settings.concurrency)

    async def ask(self, body: object) -> object:
        """Returns the content of the response, which is JSON, or a Failure after all retries.

        The request is a POST of `body`; without one, a GET.
        While the circuit is open it returns a Failure at once.
        """
        # Held while it waits, so that a server with many failures gets fewer requests.
        async with self._turns:
            admission = self.server.circuit.admit()
            if admission == "no":
                return self.server.fail(UNREACHABLE, self.server.circuit.state)
            answer = last = await self._try(body)
            for seconds in waits(self.server.settings) if admission == "request" else []:
                if not (isinstance(last, Failure) and last.kind.is_retried):
                    break
                await asyncio.sleep(min(max(seconds, last.wait_seconds), MOST_WAIT_SECONDS))
                if self.server.circuit.is_open:  # by another request
                    break
                last = await self._try(body)
                # A request that makes a server crash gets a 500 and then, while it starts, 503s.
                if not (_is_of(BROKEN, answer) and _is_of(UNREACHABLE, last)):
                    answer = last
            is_failed = isinstance(answer, Failure) and answer.kind.is_retried
            streak = self.server.circuit.report(answered=not is_failed)
            return answer._replace(streak=streak) if isinstance(answer, Failure) else answer

    async def _try(self, body: object) -> object:
        # Imported here: see above.
        import httpx

        limit, fail = self.server.settings.timeout_seconds, self.server.fail
        try:
            async with asyncio.timeout(limit):
                status, content, retry_after = await self._send(body)
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

    async def _send(self, body: object) -> tuple[int, bytes, str]:
        """Returns status, content and Retry-After.

        Of a content that is too long, it returns more than MOST_BYTES.
        """
        headers = {"Content-Type": "application/json"}
        if self.server.key:
            headers["Authorization"] = f"Bearer {self.server.key}"
        method, sent = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        url = self.server.settings.url
        async with self._http.stream(method, url, content=sent, headers=headers) as response:
            content = bytearray()
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    break
            return response.status_code, bytes(content), response.headers.get("Retry-After", "")


def _is_of(kind: Kind, answer: object) -> bool:
    return isinstance(answer, Failure) and answer.kind is kind


def read_key(settings: RequestSettings, where: str) -> str | None:
    """Returns the key of a server from the environment; None if it asks for none.

    Args:
      where: Path of the settings, for messages.

    Raises:
      ParameterError: If the environment variable is not set, or holds no key.
    """
    if settings.key_variable is None:
        return None
    key = os.environ.get(settings.key_variable, "").strip()
    if not re.fullmatch(TOKEN, key):
        raise ParameterError(
            f"{PARAMS}: {where}.key_variable: the environment variable {settings.key_variable} "
            "must hold the server's key, on every host that asks it"
        )
    return key


def open_http(settings: RequestSettings) -> "httpx.AsyncClient":
    """Returns connections for `Client`, which has the timeouts, to be closed by the caller."""
    # Imported here: see above.
    import httpx

    connections = httpx.Limits(max_connections=settings.concurrency)
    # Redirects are not followed: the key is for this server alone.
    return httpx.AsyncClient(
        timeout=None, limits=connections, follow_redirects=False, verify=_certificates()
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Returns the trusted certificates; reading them takes longer than asking a near server."""
    # Imported here: see above.
    import httpx

    return httpx.create_ssl_context()


def _read_seconds(retry_after: str) -> float:
    """Returns the seconds of a Retry-After; 0 for a date, because clocks differ, and for others."""
    return float(retry_after) if re.fullmatch(r"\d{1,9}", retry_after) else 0.0


def _kind_of(status: int) -> Kind:
    if status in REFUSALS or status < 400:  # a redirect
        return REFUSED
    if status in OVERLOADS:
        return UNREACHABLE
    return BROKEN if status >= 500 else UNSUITABLE
