"""HTTP servers on loopback that judge, count and fail as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from grpo.rewards.base import JudgeInputs, Task
from grpo.schema import Machine, Strict


class Response(NamedTuple):
    """What a server answers."""

    content: bytes
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


def as_json(value: object) -> Response:
    return Response(json.dumps(value).encode())


@dataclass
class Asked:
    """The requests that a server has received, in the order of their arrival."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0  # requests in progress
    most_at_once: int = 0


@contextmanager
def serving(respond: Callable[[Any], Response]) -> Iterator[Asked]:
    """Serves on a free port of loopback until the block ends.

    Args:
      respond: Called in a thread per request, with the request's JSON.
    """
    with serving_paths(lambda path, body: respond(body)) as asked:
        asked.url += "/judge"
        yield asked


@contextmanager
def serving_paths(respond: Callable[[str, Any], Response]) -> Iterator[Asked]:
    """Serves several paths.

    Args:
      respond: Called in a thread per request, with its path and its JSON, None for a GET.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            with lock:
                asked.bodies.append(body)
                asked.keys.append(self.headers["Authorization"])
                asked.at_once += 1
                asked.most_at_once = max(asked.most_at_once, asked.at_once)
            response = respond(self.path, body)
            with lock:
                asked.at_once -= 1
            self.send_response(response.status)
            for name, value in response.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *args: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that does not wait is no error of the server."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        asked = Asked(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


def closed_url() -> str:
    """Returns the address of a server that has ended."""
    with serving(lambda body: Response(b"")) as asked:
        return asked.url


def inputs_with(settings: Strict) -> JudgeInputs:
    return JudgeInputs(
        where="reward.judges[0]",
        model=None,
        data=Path(),
        machine=Machine(device="cpu", dtype="float32", threads=1, compile=False),
        settings=settings,
    )


def tasks_of(*prompts: str) -> list[Task]:
    return [Task(family="f", prompt=each, answer=f"={each}", entry={"n": 1}) for each in prompts]
