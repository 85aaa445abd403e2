"""Sampling by a vLLM server over HTTP: token ids go to `/v1/completions`, and come with log-probs.

The server gets the policy's weights by endpoints of its development mode. Each time, they get a new
version: rollouts are kept only if the server had one version from before the first to after the
last of them.
"""

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_SH
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo.errors import ParameterError, RefusedError, ServerError, WorkerError, brief
from grpo.modalities.tokens.modality import VllmServerParams
from grpo.modalities.tokens.vllm_engine import TOKEN_DTYPE, Message
from grpo.runtime.artifacts.files import locked, sha256_of
from grpo.runtime.circuit import Circuit
from grpo.runtime.servers import Client, Failure, Server, open_http, read_key
from grpo.schema import PARAMS

WHERE = "policy.server"
LOADING = "loading"  # the version of weights that are being replaced
# In every request: the server's own defaults may be those of a generation_config.json.
NO_FILTERS = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ServedEngine:
    """An engine behind a server, which other processes and stages may ask, too."""

    def __init__(self, settings: VllmServerParams, *, dtype: str, has_tied_output: bool) -> None:
        """Asks the server for its configuration.

        Args:
          dtype: That of the policy, as torch names it.
          has_tied_output: Whether the output layer is the embedding.

        Raises:
          ParameterError: If the server cannot sample from the policy, or refuses the key.
          ServerError: If it does not answer.
        """
        key = read_key(settings, WHERE)
        self._server = Server(where=WHERE, settings=settings, circuit=Circuit(None), key=key)
        self._files: list[Path] = []  # of the weights
        self._weights = ""  # their hash
        name = urlsplit(settings.url).netloc.replace(":", "-")
        self._directory = Path(settings.directory) / f"grpo-{name}"
        self._lock = self._directory.with_suffix(".lock")
        try:
            with locked(self._lock, LOCK_SH):
                pass
        except OSError as error:
            raise ParameterError(
                f"{PARAMS}: {WHERE}.directory: must be a directory that this process can write "
                f"and the server can read, {brief(error)}"
            ) from None
        self.positions = self._find_positions(dtype, has_tied_output)

    def _find_positions(self, dtype: str, has_tied_output: bool) -> int:
        """Returns the length of the server's context; see `__init__`."""
        match self._ask("/server_info?config_format=json"):
            case {
                "vllm_config": {
                    "model_config": {
                        "dtype": str(its_dtype),
                        "logprobs_mode": str(its_mode),
                        "max_model_len": int(positions),
                    },
                    "device_config": {"device": device},
                }
            }:
                found = {"dtype": its_dtype.removeprefix("torch."), "logprobs-mode": its_mode}
            case _:
                raise self._refuse("its /server_info is not that of vLLM 0.32; start such a server")
        for name, needed in {"dtype": dtype, "logprobs-mode": "processed_logprobs"}.items():
            if found[name] != needed:
                raise self._refuse(f"it has {found[name]}; start it with --{name} {needed}")
        if has_tied_output and device == "cpu":
            raise self._refuse(
                "on a CPU, vLLM's server cannot replace an output layer that is tied to the "
                "embedding; set policy.sampler to vllm or transformers"
            )
        return positions

    def stop(self) -> None:
        """Does nothing: the server does not belong to this process."""

    def ask(self, what: str, tensors: Mapping[str, Tensor] = {}, **header: Any) -> Message:
        """Returns the answer to a request, as `vllm_engine.py` does.

        Weights are sent when they are first sampled from.

        Raises:
          ParameterError: If the server refuses the request.
          ServerError: If it does not answer.
          ConnectionError: If its weights were replaced while it sampled.
        """
        if what == "load":
            path = Path(header["path"])
            files = [each.resolve() for each in sorted(path.glob("*.safetensors"))]
            self._files = files or [path]
            hashes = " ".join(map(sha256_of, self._files))
            self._weights = hashlib.sha256(hashes.encode()).hexdigest()
        if what == "generate":
            return self._generate(tensors, header["decoding"])
        return Message({})  # "sleep" among them: its memory is not that of the trainer

    def describe_loss(self, error: ConnectionError) -> WorkerError:
        """Returns the error that ends the stage if rollouts were lost again."""
        return WorkerError(
            f"{_describe(self._server)}: rollouts were dropped twice: {error}; let nothing load "
            f"weights without a lock in {WHERE}.directory, and rerun: finished batches are kept"
        )

    def _generate(self, tensors: Mapping[str, Tensor], decoding: Mapping[str, Any]) -> Message:
        """Returns a rollout per seed, one after the other, with log-probs in nats."""
        prompts = [each.tolist() for each in tensors["tokens"].split(tensors["lengths"].tolist())]
        requests = [
            {
                "prompt": prompts[row],
                "temperature": decoding["temperature"],
                "max_tokens": decoding["max_steps"],
                "stop_token_ids": decoding["end_tokens"],
                "seed": seed,
                "logprobs": 0,  # of the sampled token only
                "return_token_ids": True,
                **NO_FILTERS,
            }
            for row, seed in zip(tensors["group"].tolist(), tensors["seeds"].tolist())
        ]
        with self._loaded() as version:
            drawn = [self._read(each) for each in self._ask_all("/v1/completions", requests)]
            if self._version() != version:
                raise ConnectionResetError("its weights were replaced, or it was started again")
        return Message(
            {},
            {
                "tokens": torch.cat([torch.tensor(each, dtype=TOKEN_DTYPE) for each, _ in drawn]),
                "logp": torch.cat([torch.tensor(each) for _, each in drawn]),
                "steps": torch.tensor([len(each) for each, _ in drawn]),
            },
        )

    def _read(self, answer: Any) -> tuple[list[int], list[float]]:
        """Returns the tokens and log-probs of a rollout."""
        match answer:
            case {
                "choices": [
                    {
                        "finish_reason": "stop" | "length",
                        "token_ids": [_, *_] as tokens,
                        "logprobs": {"token_logprobs": [*logp]},
                    }
                ]
            } if len(tokens) == len(logp):
                return tokens, logp
            case {"choices": [{"finish_reason": "abort"}]}:
                raise ConnectionAbortedError("a request was aborted")
        raise self._refuse(f"no tokens with log-probs in {answer}")

    @contextmanager
    def _loaded(self) -> Iterator[str]:
        """Yields the version of the weights in the server, once they are those of the policy.

        Processes with the same weights sample at the same time, others take turns.
        """
        with locked(self._lock, LOCK_SH):
            if self._is_mine(version := self._version()):
                yield version
                return
        with locked(self._lock, LOCK_EX):
            yield version if self._is_mine(version := self._version()) else self._load()

    def _is_mine(self, version: str) -> bool:
        return version.partition("-")[0] == self._weights

    def _version(self) -> str:
        version: str = self._ask("/weight_info")["weight_version"]
        return version

    def _load(self) -> str:
        """Replaces the weights in the server; returns their version."""
        # First, so that a process that is killed here leaves no weights under a wrong name.
        self._ask("/update_weight_version", {"new_version": LOADING})
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        for index, file in enumerate(self._files):
            shutil.copyfile(file, self._directory / f"{index}.safetensors")
        arguments = {"weights_path": str(self._directory.resolve())}
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        shutil.rmtree(self._directory)
        # Requests that a killed process has left may hold a part of the cache.
        self._ask("/reset_prefix_cache?reset_running_requests=true", {})
        version = f"{self._weights}-{uuid.uuid4().hex}"
        self._ask("/update_weight_version", {"new_version": version})
        return version

    def _ask(self, path: str, body: object = None) -> Any:
        """Returns the response to a POST of `body`; without one, to a GET."""
        (answer,) = self._ask_all(path, [body])
        return answer

    def _ask_all(self, path: str, bodies: Sequence[object]) -> list[Any]:
        """Returns the responses; raises the error of the first request that fails at last."""
        return asyncio.run(self._send(path, bodies))

    async def _send(self, path: str, bodies: Sequence[object]) -> list[Any]:
        async with open_http(self._server.settings) as http:
            client = Client(self._endpoint(path), http)
            try:
                async with asyncio.TaskGroup() as group:  # a failure cancels the other requests
                    tasks = [group.create_task(_require(client, each)) for each in bodies]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [each.result() for each in tasks]

    def _endpoint(self, path: str) -> Server:
        url = self._server.settings.url.rstrip("/") + path
        return replace(self._server, settings=self._server.settings.model_copy(update={"url": url}))

    def _refuse(self, why: str) -> ParameterError:
        return RefusedError(f"{_describe(self._server)}: {why}")


async def _require(client: Client, body: object) -> Any:
    """Returns the response to a request; raises the error that its failure means."""
    answer = await client.ask(body)
    if not isinstance(answer, Failure):
        return answer
    what = f"{_describe(client.server)}: {brief(answer.detail)}"
    if answer.kind.is_retried:
        raise ServerError(
            f"{what}; start the server or correct {WHERE}, and rerun: finished batches are kept"
        )
    raise RefusedError(f"{what}; start vLLM's server as docs/own-model.md says")


def _describe(server: Server) -> str:
    return f"{PARAMS}: {WHERE}.url: {server.address}"


def start_served(
    settings: VllmServerParams,
    dtype: str,
    has_tied_output: bool,
    directory: Path,
    weights: Path | None,
) -> ServedEngine:
    """Returns the engine of a server, for the weights of a file, or else for the directory's."""
    engine = ServedEngine(settings, dtype=dtype, has_tied_output=has_tied_output)
    engine.ask("load", path=str(weights or directory))
    return engine
