"""vLLM's own server on loopback, with the endpoints that load weights, on a CPU."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

from flows.server import free_port
from grpo.modalities.tokens.vllm import find_python
from grpo.modalities.tokens.vllm_engine import ENVIRONMENT
from tests.infra.reward_servers import ask
from tests.rewards.servers import Response

START_SECONDS = 300.0
OPTIONS = (
    *("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enforce-eager"),
    *("--kv-cache-memory-bytes", "200000000", "--no-enable-chunked-prefill"),
)


@dataclass
class VllmServer:
    """A process group with the server and its engine."""

    model: Path
    options: tuple[str, ...]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        names = {"PYTHONPATH", "PYTHONHOME", "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.log = (self.model.parent / f"{self.port}.log").open("a")
        program = [find_python(), "-P", "-m", "vllm.entrypoints.openai.api_server"]
        place = ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*program, *place, *OPTIONS, *self.options],
            env={
                **{name: each for name, each in os.environ.items() if name not in names},
                **{name: each for name, each in ENVIRONMENT.items() if name not in names},
                "OMP_NUM_THREADS": "1",
                "VLLM_SERVER_DEV_MODE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self.process.poll() is None, Path(self.log.name).read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return ask(f"{self.url}/health").status == 200
        except URLError:
            return False

    def kill(self) -> None:
        """Ends it as the kernel does when memory is full."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def ask(self, path: str, body: Any) -> Response:
        """Returns the answer to a request of another program, without a key."""
        return ask(self.url + path, body, **{"Content-Type": "application/json"})


@contextmanager
def vllm_server(model: Path, *options: str) -> Iterator[VllmServer]:
    """Runs the server on a directory of weights, configuration and tokenizer."""
    server = VllmServer(model, options, free_port())
    server.start()
    try:
        yield server
    finally:
        server.kill()
