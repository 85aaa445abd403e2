"""A server of rewards for judges that need packages of their own: docs/remote-judges.md.

    python infra/reward_server.py --judge PACKAGE.MODULE:FUNCTION   # needs nothing of this project
    python infra/reward_server.py --parameters params.yaml          # its first judge

It answers what the judges `reward_server` and `media_server` ask. The judge runs in a process of
its own: one that crashes or hangs is replaced, and its requests get HTTP 500. REWARD_SERVER_TOKEN
is the key that clients must send; without it the server listens on loopback only.
"""

import argparse
import asyncio
import base64
import hmac
import importlib
import inspect
import io
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = "REWARD_SERVER_TOKEN"
IS_JUDGE = "REWARD_SERVER_IS_JUDGE"  # set in the environment of the judge's process
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PART_BYTES = 2**16
SPARE_CONNECTIONS = 16  # beside those of requests that are judged, e.g. for /health
DETAIL_CHARACTERS = 200
RETRY_SECONDS = 1
Item = float | dict[str, str]  # a score, or {"status": ..., "detail": ...}
Columns = dict[str, list[Any]]
Score = Callable[[Columns], Sequence[object]]  # one result per row; raises if it fails on one


class JudgeError(Exception):
    """The judge gave no result; the message says why."""


class RequestError(Exception):
    """A request that is answered with an HTTP status of its own."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


# ---------------------------------------------------------------- the process of the judge


def run_judge(options: argparse.Namespace) -> None:
    """Loads the judge, then answers requests, lines of JSON, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the judge prints is no answer
    sys.path.insert(0, str(Path.cwd()))

    def answer(value: object) -> None:
        answers.write(json.dumps(value, allow_nan=False) + "\n")
        answers.flush()

    try:
        score = load_function(options.judge) if options.judge else load_first(options.parameters)
    except Exception as error:  # noqa: BLE001  the code of others
        answer({"error": _describe(error)})
        return
    answer({"error": None})
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(0)  # the server has ended, even if the judge has not

    threading.Thread(target=receive, daemon=True).start()
    while True:
        answer(judge_rows(score, json.loads(asked.get())))


def load_function(path: str) -> Score:
    """Returns the judge that calls a function (prompts, completions | media, **columns).

    Args:
      path: PACKAGE.MODULE:FUNCTION, or with a dot instead of the colon.

    Raises:
      ValueError: If it names no function.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if not module or not name:
        raise ValueError(f"--judge must be PACKAGE.MODULE:FUNCTION, got {path!r}")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"--judge must name a function, {module} has none called {name!r}")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    named = {each.name for each in parameters}

    def score(columns: Columns) -> Sequence[object]:
        given = {"prompts": columns["prompts"], **_own_columns(columns)}
        if "media" in columns:
            given["media"] = [[_picture(each) for each in frames] for frames in columns["media"]]
        else:
            given["completions"] = columns["completions"]
        found: Any = function(**{name: each for name, each in given.items()
                                 if takes_all or name in named})  # fmt: skip
        if inspect.isawaitable(found):
            found = asyncio.run(_wait_for(found))
        return [*found]

    return score


def load_first(parameters: str) -> Score:
    """Returns the first judge of `reward.judges` in a file of parameters, as a stage builds it."""
    # Imported here: the server of a function needs nothing of this project.
    import numpy as np

    from grpo.params.parameters import read_params
    from grpo.rewards.base import Task
    from grpo.sampling.judging import JointJudge
    from grpo.schema import DATA
    from grpo.wiring.rewards import build_judges

    judge = next(iter(build_judges(read_params(Path(parameters)), DATA, "reward").values()))

    def score(columns: Columns) -> Sequence[object]:
        rows = zip(*(columns[each] for each in ("families", "prompts", "answers", "entries")))
        tasks = [Task(family=f, prompt=p, answer=a, entry=e) for f, p, a, e in rows]
        if isinstance(judge, JointJudge) and judge.reads_media:
            found = [outcome for _, outcome in judge.judge(_stack(columns["media"], np), tasks)]
        else:
            found = [*judge.judge_texts(columns["completions"], tasks)]
        return [
            each.score
            if each.status == "scored"
            else {"status": each.status, "detail": each.detail or each.status}
            for each in found
        ]

    return score


def judge_rows(score: Score, columns: Columns) -> list[Item]:
    """Returns one item per row; if the judge raises, or gives too few, rows are judged alone."""
    count = len(columns["prompts"])
    try:
        found = score(columns)
        if len(found) != count:
            raise ValueError(f"must return {count} scores, returned {len(found)}")
        return [_item(each) for each in found]
    except Exception as error:  # noqa: BLE001  the rollout boundary
        if count == 1:
            return [{"status": "failed", "detail": _describe(error)}]
    alone = [{name: [each[row]] for name, each in columns.items()} for row in range(count)]
    return [item for each in alone for item in judge_rows(score, each)]


def _item(found: Any) -> Item:
    """Returns a finite score, or why there is none; numpy's and torch's numbers are numbers."""
    if isinstance(found, dict):
        return found
    if isinstance(found, str | bytes) or not hasattr(found, "__float__"):
        return {"status": "failed", "detail": f"returned {_brief(repr(found))}, not a number"}
    value = float(found)
    if not math.isfinite(value):
        return {"status": "failed", "detail": f"returned {value}; it must be finite"}
    return value


def _own_columns(columns: Columns) -> Columns:
    """Returns the columns besides texts and media: answer, family and the fields of entries."""
    entries = columns["entries"]
    names = dict.fromkeys(name for each in entries for name in each)
    return {name: [each.get(name) for each in entries] for name in names} | {
        "answer": columns["answers"],
        "family": columns["families"],
    }


def _picture(png: str) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(png, validate=True)), formats=["PNG"]) as image:
        image.load()
        return image


def _stack(media: list[list[str]], np: Any) -> Any:
    """Returns images [row, channel, height, width], or clips with an axis of frames."""
    rows = []
    for frames in media:
        arrays = [np.asarray(_picture(each)) for each in frames]
        channels_first = [each[None] if each.ndim == 2 else each.transpose(2, 0, 1)
                          for each in arrays]  # fmt: skip
        rows.append(channels_first[0] if len(frames) == 1 else np.stack(channels_first, axis=1))
    return np.stack(rows)


async def _wait_for(found: Any) -> Any:
    return await found


def _brief(text: str) -> str:
    return " ".join(text.split())[:DETAIL_CHARACTERS].encode(errors="replace").decode()


def _describe(error: BaseException) -> str:
    return _brief(f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- the server


class JudgeProcess:
    """The process of the judge; one batch at a time, and a new process after one that ended."""

    def __init__(self, *, start_seconds: float, batch_seconds: float) -> None:
        self._start_seconds, self._batch_seconds = start_seconds, batch_seconds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.is_ready = False

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
          JudgeError: If the judge cannot be loaded.
        """
        with self._turn:
            self._start()

    def judge(self, columns: Columns) -> list[Item]:
        """Returns an item per row.

        Raises:
          JudgeError: If the process ends or takes longer than a batch may; it is replaced.
        """
        with self._turn:
            self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            with suppress(OSError):  # it has ended; `_receive` notices
                self._process.stdin.write(json.dumps(columns) + "\n")
                self._process.stdin.flush()
            found: list[Item] = self._receive(self._batch_seconds)
            return found

    def ensure(self) -> bool:
        """Returns whether the judge is loaded; if not, it is started in the background."""
        if not self.is_ready and not self._turn.locked():
            threading.Thread(target=self._try_start, daemon=True).start()
        return self.is_ready

    def _try_start(self) -> None:
        with suppress(JudgeError):  # the next request tries again
            self.start()

    def end(self) -> None:
        """Ends the process."""
        self.is_ready = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if self._process is not None and self.is_ready and self._process.poll() is None:
            return
        self.end()
        self._answers = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**{key: each for key, each in os.environ.items() if key != TOKEN}, IS_JUDGE: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        arguments = (self._process, self._answers)
        threading.Thread(target=_pass_on, args=arguments, daemon=True).start()
        error = self._receive(self._start_seconds)["error"]
        if error is not None:
            raise JudgeError(f"cannot load the judge, {error}")
        self.is_ready = True

    def _receive(self, seconds: float) -> Any:
        assert self._process is not None
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            raise JudgeError(f"the judge took longer than {seconds:g} seconds") from None
        if line is None:
            code = self._process.wait()
            self.end()
            raise JudgeError(f"the judge's process ended, exit code {code}")
        return json.loads(line)


def _pass_on(process: subprocess.Popen[str], answers: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(None)


class Limits(NamedTuple):
    """Bounds of requests."""

    body_bytes: int
    rows: int
    requests: int  # received or judged at a time; others get HTTP 429
    receive_seconds: float  # of a request


class Server(ThreadingHTTPServer):
    """Serves POST /score and GET /health."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], judge: JudgeProcess, limits: Limits, token: str | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.judge, self.limits, self.token = judge, limits, token
        self.turns = threading.BoundedSemaphore(limits.requests)
        self._connections = threading.BoundedSemaphore(limits.requests + SPARE_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own, if there are not too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that leave."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.0"  # one request per connection

    def setup(self) -> None:
        """Bounds each read and write of the connection."""
        super().setup()
        self.connection.settimeout(self.server.limits.receive_seconds)

    def do_GET(self) -> None:
        """Answers /health: 200 if the judge is loaded, else 503."""
        if self.path != "/health":
            self._send(404, {"error": "ask GET /health or POST /score"})
        else:
            ready = self.server.judge.is_ready
            self._send(200 if ready else 503, {"status": "ready" if ready else "loading"})

    def do_POST(self) -> None:
        """Answers with one item per row, or with an error of the whole request."""
        try:
            length = self._length()
            if not self.server.turns.acquire(blocking=False):
                self._discard(length)
                raise RequestError(429, "too many requests at a time")
            try:
                self._score(length)
            finally:
                self.server.turns.release()
        except RequestError as error:
            self._send(error.status, {"error": str(error)})

    def _score(self, length: int) -> None:
        started = time.monotonic()
        body = self._receive(length)
        form, columns = read_columns(body, self.server.limits.rows)
        if not self.server.judge.ensure():
            raise RequestError(503, "the judge is being loaded")
        try:
            items = self.server.judge.judge(columns)
        except JudgeError as error:
            raise RequestError(500, str(error)) from None
        self._send(200, {"rewards": items} if form == "openrlhf" else items)
        seconds = time.monotonic() - started
        failed = sum(isinstance(each, dict) for each in items)
        self._log(f"{len(items)} rows, {failed} without a score, {seconds:.2f} s")

    def _length(self) -> int:
        """Returns the bytes of the body of a request that may be read."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise RequestError(411, "Content-Length is missing") from None
        given = self.headers.get("Authorization", "")
        token = self.server.token
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            self._discard(length)
            raise RequestError(401, f"Authorization must be Bearer and the server's {TOKEN}")
        if self.path != "/score":
            self._discard(length)
            raise RequestError(404, "ask POST /score")
        if not 0 <= length <= self.server.limits.body_bytes:
            self._discard(length)
            raise RequestError(
                413, f"the request has more than {self.server.limits.body_bytes} bytes"
            )
        return length

    def _receive(self, length: int) -> bytes:
        body = bytearray()
        deadline = time.monotonic() + self.server.limits.receive_seconds
        while len(body) < length:
            try:
                part = self.rfile.read1(min(PART_BYTES, length - len(body)))
            except TimeoutError:
                part = b""
            body += part
            if not part or time.monotonic() > deadline:
                raise RequestError(408, "the request did not arrive in time")
        return bytes(body)

    def _discard(self, length: int) -> None:
        """Reads a body that is not used: a client that still writes would not read the answer."""
        deadline = time.monotonic() + self.server.limits.receive_seconds
        with suppress(TimeoutError):
            while length > 0 and time.monotonic() < deadline:
                part = self.rfile.read1(min(PART_BYTES, length))
                if not part:
                    return
                length -= len(part)

    def _send(self, status: int, value: object) -> None:
        content = json.dumps(value, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status in (429, 503):
            self.send_header("Retry-After", str(RETRY_SECONDS))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Writes errors only; contents of requests are never written."""
        if not str(code).startswith("2"):
            self._log(f"{self.command} HTTP {code}")

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing: a malformed request line may hold anything."""

    def _log(self, text: str) -> None:
        print(f"{self.log_date_time_string()} {text}", file=sys.stderr, flush=True)


def read_columns(body: bytes, most_rows: int) -> tuple[str, Columns]:
    """Returns the form of a request and its columns, all of one length.

    Raises:
      RequestError: If it has another form, or too many rows.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(422, "the request is no JSON") from None
    if not isinstance(given, dict):
        raise RequestError(422, "the request must be an object of lists")
    form = "openrlhf" if "query" in given else "columns"
    if form == "openrlhf":
        given = _as_columns(given)
    text = "media" if "media" in given else "completions"
    names = ("prompts", text, "answers", "families", "entries")
    columns = {name: given.get(name) for name in names}
    counts = {name: len(each) if isinstance(each, list) else None for name, each in columns.items()}
    if None in counts.values() or len({*counts.values()}) != 1:
        raise RequestError(422, f"{', '.join(names)} must be lists of one length")
    if not 0 < len(columns["prompts"]) <= most_rows:
        raise RequestError(422, f"must have 1 to {most_rows} rows, got {len(columns['prompts'])}")
    for name, kind in zip(names, (str, list if text == "media" else str, str, str, dict)):
        if not all(isinstance(each, kind) for each in columns[name]):
            raise RequestError(422, f"{name} must hold {kind.__name__}")
    return form, columns


def _as_columns(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of a request of the form openrlhf: a query is prompt and text joined."""
    try:
        prompts, labels = given["prompts"], given["labels"]
        texts = [query.removeprefix(prompt) for query, prompt in zip(given["query"], prompts)]
        count = len(given["query"])
    except (KeyError, TypeError, AttributeError):
        raise RequestError(422, "query, prompts, labels must be lists of texts") from None
    others = {"families": [""] * count, "entries": [{} for _ in range(count)]}
    return {"prompts": prompts, "completions": texts, "answers": labels, **others}


def read_options() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    judge = parser.add_mutually_exclusive_group(required=True)
    judge.add_argument("--judge", help="PACKAGE.MODULE:FUNCTION, found from this directory")
    judge.add_argument("--parameters", help="a parameter file; its first judge is served")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed")
    parser.add_argument("--body-bytes", type=int, default=2**26)
    parser.add_argument("--rows", type=int, default=128, help="of a request")
    parser.add_argument("--requests", type=int, default=16, help="at a time")
    parser.add_argument("--receive-seconds", type=float, default=60.0)
    parser.add_argument("--batch-seconds", type=float, default=600.0, help="until it is ended")
    parser.add_argument("--start-seconds", type=float, default=1800.0, help="of the judge")
    return parser.parse_args()


def main() -> None:
    """Serves until it is ended; a judge that cannot be loaded is one line and exit code 2."""
    options = read_options()
    if os.environ.get(IS_JUDGE):
        run_judge(options)
        return
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and options.host not in LOOPBACK:
        sys.exit(_refuse(f"{TOKEN} must be set to listen on {options.host}"))
    judge = JudgeProcess(start_seconds=options.start_seconds, batch_seconds=options.batch_seconds)
    limits = Limits(options.body_bytes, options.rows, options.requests, options.receive_seconds)
    try:
        server = Server((options.host, options.port), judge, limits, token)
    except OSError as error:
        sys.exit(_refuse(f"cannot listen on {options.host}:{options.port}, {error}"))
    with server:
        print(f"http://{options.host}:{server.server_address[1]}/score", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            judge.start()
            threading.Event().wait()
        except JudgeError as error:
            sys.exit(_refuse(str(error)))
        except KeyboardInterrupt:
            pass
        finally:
            judge.end()


def _refuse(reason: str) -> int:
    print(f"reward_server: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
