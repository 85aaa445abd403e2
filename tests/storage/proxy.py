"""A proxy between the library and an S3 server, which remembers requests and does them harm."""

import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event, Lock, Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

HOP_BY_HOP = {"connection", "expect", "transfer-encoding", "content-length"}
ERROR = "<Error><Code>{0}</Code><Message>{1}</Message></Error>"


class Seen(NamedTuple):
    """A request."""

    method: str
    key: str  # with the bucket
    query: dict[str, list[str]]
    range: str  # as asked for; none: empty

    @property
    def is_part(self) -> bool:
        """Whether it moves a part of an object."""
        return bool(self.range) or "partNumber" in self.query


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Fault(NamedTuple):
    """What happens to the first requests that fit."""

    fits: Callable[[Seen], bool]
    times: int
    heard_fraction: float = 1.0  # of the request's bytes, before the connection is cut
    before: Callable[[], object] = lambda: None  # is called before the server sees it
    instead: Answer | None = None  # of the server's answer, which never sees the request
    harm: Callable[[Answer], Answer] = lambda answer: answer
    sent_fraction: float = 1.0  # of the answer's bytes, before the connection is cut
    after: Callable[[], object] = lambda: None  # is called once they are sent


SLOW = ("no answer", "too many requests")  # faults whose tests take seconds


def cases(faults: Mapping[str, list[Fault]]) -> list[Any]:
    """Returns a test case per name; those of slow faults are long."""
    return [
        pytest.param(each, id=name, marks=[pytest.mark.long] if name in SLOW else [])
        for name, each in faults.items()
    ]


def refuse(status: int, code: str, message: str = "") -> Answer:
    """Returns an answer with an error of S3."""
    return Answer(status, [], ERROR.format(code, message).encode())


def corrupt(answer: Answer) -> Answer:
    """Returns an answer of which one bit is another."""
    middle = len(answer.body) // 2
    changed = bytes([answer.body[middle] ^ 1])
    return answer._replace(body=answer.body[:middle] + changed + answer.body[middle + 1 :])


class Proxy:
    """Where the library connects to."""

    def __init__(self, port: int, server_port: int) -> None:
        self.url = f"http://localhost:{port}"
        self.server_port = server_port
        self.seen: list[Seen] = []
        self._faults: list[Fault] = []
        self._lock = Lock()
        self._over = Event()  # what is held

    def inject(self, fault: Fault) -> None:
        self._faults.append(fault)

    def clear(self) -> None:
        """Forgets requests and faults, and lets go of what is held."""
        self.seen.clear()
        self._faults.clear()
        self._over.set()
        self._over = Event()

    def hold(
        self, number: int, fits: Callable[[Seen], bool], *, sent_fraction: float | None
    ) -> Event:
        """Holds the request of a number that fits; returns what is set once it does.

        Args:
          sent_fraction: Of the answer, before it stops; None: the server never sees the request.
        """
        arrived, over, counted = Event(), self._over, count(1)

        def wait() -> None:
            arrived.set()
            over.wait(60)

        def is_it(seen: Seen) -> bool:
            return fits(seen) and next(counted) == number

        if sent_fraction is None:
            self.inject(Fault(is_it, 1, before=wait, instead=refuse(500, "InternalError")))
        else:
            self.inject(Fault(is_it, 1, sent_fraction=sent_fraction, after=wait))
        return arrived

    def parts(self) -> list[Seen]:
        """Returns the requests that moved parts."""
        return [each for each in self.seen if each.is_part]

    def take(self, seen: Seen) -> Fault:
        """Remembers a request and returns what is to happen to it."""
        with self._lock:
            self.seen.append(seen)
            for place, each in enumerate(self._faults):
                if each.times and each.fits(seen):
                    self._faults[place] = each._replace(times=each.times - 1)
                    return each
        return Fault(lambda _: True, 1)


def slowly(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


@contextmanager
def running(server_port: int) -> Iterator[Proxy]:
    """Yields a proxy in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def pass_on(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            url = urlsplit(self.path)
            seen = Seen(
                method=self.command,
                key=unquote(url.path.strip("/")),
                query=parse_qs(url.query, keep_blank_values=True),
                range=self.headers.get("Range", ""),
            )
            fault = proxy.take(seen)
            body = self.rfile.read(int(fault.heard_fraction * length))
            if fault.heard_fraction < 1:
                self.close_connection = True
                return
            fault.before()
            answer = fault.harm(fault.instead or self.ask_server(body))
            try:
                self.send(answer, fault.sent_fraction)
                fault.after()
            except OSError:  # the client is gone
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

        def ask_server(self, body: bytes) -> Answer:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            connection = http.client.HTTPConnection("127.0.0.1", server_port)
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return Answer(answer.status, answer.getheaders(), content)

        def send(self, answer: Answer, fraction: float) -> None:
            self.send_response_only(answer.status)
            lengths = [value for name, value in answer.headers if name.lower() == "content-length"]
            for name, value in answer.headers:
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            is_head = self.command == "HEAD" and lengths
            self.send_header("Content-Length", lengths[0] if is_head else str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: int(fraction * len(answer.body))])
            self.close_connection = self.close_connection or fraction < 1

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        proxy = Proxy(listener.server_port, server_port)
        thread = Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield proxy
        listener.shutdown()
        thread.join()
