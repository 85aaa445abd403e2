"""Sampling by vLLM, in a process of its own and by the Python of an environment of its own.

The policy samples with any engine, also with that of a server (`vllm_server.py`).

vLLM's numerics differ from the trainer's: put `truncate_mismatch` before the trust region
(docs/methods/engine_mismatch.md). Draws are seeded by rollout; the same bytes are repeated only on
the same device, version and batch.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.errors import MissingExtraError, ParameterError, WorkerError, brief
from grpo.modalities.shared.directories import copy_weights, require_weights, whole_policy
from grpo.modalities.shared.flops import Pass
from grpo.modalities.shared.models import merged_weights
from grpo.modalities.tokens import vllm_engine
from grpo.modalities.tokens.modality import VllmParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.vllm_engine import TOKEN_DTYPE, Message, read_message, write_message
from grpo.runtime.artifacts.tensors import ragged_mask, unpack_ragged
from grpo.runtime.shared_tensors import SharedTensors
from grpo.schema import PARAMS
from grpo.types import Cost

PYTHON = "GRPO_VLLM_PYTHON"  # names the Python of vLLM's environment; unset: this one
GRACE_SECONDS = 5.0  # for an engine whose socket is closed to end


def find_python() -> str:
    """Returns the Python that has vLLM.

    Raises:
      MissingExtraError: If there is none.
    """
    named = os.environ.get(PYTHON)
    if named is None and importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if named is None:
        raise MissingExtraError(
            f"{PARAMS}: policy.sampler vllm needs vllm; run pip install -e '.[vllm]', or make vllm "
            f"and name the Python of its environment in {PYTHON}"
        )
    if shutil.which(named) is None:
        raise MissingExtraError(
            f"{PYTHON}: must name the Python of an environment with vLLM, got {named!r}, which "
            "cannot be run; run make vllm, or unset it"
        )
    return named


class SamplingEngine(Protocol):
    """What answers the requests of `vllm_engine.py`."""

    @property
    def positions(self) -> int:
        """The length of the longest rollout with its prompt."""

    @property
    def stop(self) -> Callable[[], object]:
        """Ends the engine, if it belongs to this process."""

    def ask(self, what: str, tensors: Mapping[str, Tensor] = {}, **header: Any) -> Message:
        """Returns the answer to a request; raises ConnectionError if the engine is lost."""

    def describe_loss(self, error: ConnectionError) -> WorkerError:
        """Returns the error that ends the stage if a second engine is lost."""


# Starts an engine with the weights of a policy's complete directory, or with those of a file.
StartEngine = Callable[[Path, Path | None], SamplingEngine]


class Engine:
    """A process that runs `vllm_engine.py`. It ends with this object, and with this process."""

    def __init__(self, settings: Mapping[str, Any], *, threads: int) -> None:
        """Starts vLLM on a directory of weights, configuration and tokenizer.

        Args:
          threads: Of torch, on a CPU.

        Raises:
          MissingExtraError: If no Python has vLLM.
          ParameterError: If vLLM refuses the model or a setting.
          ConnectionError: If the process ends.
        """
        python = find_python()
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [python, "-P", vllm_engine.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(python, threads),
        )
        theirs.close()
        self._stream = self._socket.makefile("rwb")
        self.stop = weakref.finalize(self, _stop, self._process, self._socket, self._stream)
        started = self.ask("start", settings=settings)
        self.received: dict[str, Any] = started.header["received"]  # what vLLM has made of them
        self.positions: int = started.header["positions"]  # of the longest rollout with its prompt

    @property
    def process_id(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def ask(self, what: str, tensors: Mapping[str, Tensor] = {}, **header: Any) -> Message:
        """Returns the answer to a request.

        Raises:
          ParameterError: If vLLM refuses the request.
          ConnectionError: If the process has ended.
        """
        try:
            write_message(self._stream, Message({"do": what, **header}, tensors))
            answer = read_message(self._stream)
        except OSError:
            raise ConnectionResetError(self._describe_end()) from None
        if "error" in answer.header:
            raise ParameterError(
                f"{PARAMS}: policy.sampler vllm: vLLM refuses to {what}: "
                f"{brief(answer.header['error'])}; correct policy or policy.vllm, or set "
                "policy.sampler to transformers"
            )
        return answer

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        code = self._process.returncode
        if code is None:
            return "it has closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def describe_loss(self, error: ConnectionError) -> WorkerError:
        """Returns the error that ends the stage if a second engine is lost."""
        return _lost("twice", error)


def start_engine(
    settings: VllmParams, dtype: str, threads: int, directory: Path, weights: Path | None
) -> Engine:
    """Returns an engine with the weights of a file, or else with those of the directory.

    Raises:
      WorkerError: If its process ends.
    """
    given = {**settings.model_dump(), "directory": str(directory.resolve()), "dtype": dtype}
    try:
        engine = Engine(given, threads=threads)
        if weights is not None:
            engine.ask("load", path=str(weights))
    except ConnectionError as error:
        raise _lost("while it started", error) from None
    return engine


def _environment(python: str, threads: int) -> dict[str, str]:
    """Returns the engine's environment; the modules of this one are of another environment."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    else:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            environment.pop(name, None)
    return environment


def _stop(process: subprocess.Popen[bytes], connection: socket.socket, stream: Any) -> None:
    process.kill()
    process.wait()
    with suppress(OSError):  # what was not sent
        stream.close()
    connection.close()


class _OpenFile:
    """A file that can be read by another path while this object exists, also if it is removed."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        weakref.finalize(self, os.close, descriptor)


class VllmPolicy(TokenPolicy):
    """A token policy that samples with a vLLM engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base: Path,
        directory: Path,
        start: StartEngine,
        decoding: Decoding,
        uses_chat_template: bool,
    ) -> None:
        """Starts the engine.

        Args:
          model: A copy on the host for FLOP counts and end tokens; with adapters, they are merged
            here into the weights that the engine gets.
          base: The base policy's directory. A different `directory` holds the trained weights.
        """
        super().__init__(model, tokenizer, decoding=decoding, uses_chat_template=uses_chat_template)
        self._base, self._directory = base, directory
        self._start_engine = start
        self._has_adapters = not all(each.requires_grad for each in model.parameters())
        # Those that have replaced those of the directory.
        self._weights: _OpenFile | SharedTensors | None = None
        if self._has_adapters:
            self._merge()
        self.engine = self._start()

    def load_weights(self, path: Path) -> None:
        """Replaces the weights of the engine by those of a file; wakes an engine that sleeps."""
        if self._has_adapters:
            copy_weights(self.model, path)
            self._merge()
        else:
            require_weights(self.model, path)
            self._keep(path)
        assert self._weights is not None
        self._ask("load", path=str(self._weights.path))

    def sleep(self) -> None:
        """Frees the memory of weights and cache; the engine stays, without weights."""
        self._ask("sleep")
        if not self._has_adapters:
            self._weights = None  # new ones must follow

    def _merge(self) -> None:
        """Keeps the weights with the adapters merged, in memory."""
        merged = merged_weights(self.model)
        if not isinstance(self._weights, SharedTensors):
            self._weights = SharedTensors(merged)
        self._weights.write(merged)

    def _keep(self, path: Path) -> None:
        """Opens the weights for an engine that is started again; their path may be gone by then."""
        self._weights = None  # first, so that the memory of two is not needed
        self._weights = _OpenFile(path)

    def _start(self) -> SamplingEngine:
        """Returns an engine with the present weights."""
        with ExitStack() as stack:
            directory = self._base
            if not self._has_adapters:
                directory = stack.enter_context(whole_policy(self._directory, self._base))
            weights = None if self._weights is None else self._weights.path
            return self._start_engine(directory, weights)

    def _ask(self, what: str, tensors: Mapping[str, Tensor] = {}, **header: Any) -> Message:
        """Returns the engine's answer; an engine that is lost is started again, once.

        The same request has the same seeds, so that the draws are the same, too.

        Raises:
          WorkerError: If the new engine is lost as well.
        """
        with suppress(ConnectionError):
            return self.engine.ask(what, tensors, **header)
        self.engine.stop()
        self.engine = self._start()
        try:
            return self.engine.ask(what, tensors, **header)
        except ConnectionError as error:
            raise self.engine.describe_loss(error) from None

    @torch.no_grad()
    def _sample(
        self, prompts: list[str], *, group_sizes: list[int], generator: Generator
    ) -> tuple[TokenTrajectory, Float[Tensor, "rollout step"]]:
        prompt, prompt_mask = self.encode(prompts)
        self._require_positions(prompt.shape[1])
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(group_sizes))
        drawn = self._ask(
            "generate",
            {
                "tokens": prompt[prompt_mask].to(TOKEN_DTYPE),
                "lengths": prompt_mask.sum(dim=1),
                "group": group,
                "seeds": torch.randint(2**63 - 1, (len(group),), generator=generator),
            },
            decoding={
                "temperature": self.decoding.temperature,
                "max_steps": self.decoding.max_steps,
                "end_tokens": self.end_tokens.tolist(),
            },
        ).tensors
        trajectory = TokenTrajectory(
            group=group,
            prompt=prompt,
            prompt_mask=prompt_mask,
            tokens=unpack_ragged(drawn["tokens"].long(), drawn["steps"]),
            mask=ragged_mask(drawn["steps"]),
        )
        self._count_sampling(trajectory)
        return trajectory, unpack_ragged(drawn["logp"], drawn["steps"])

    def _require_positions(self, prompt_tokens: int) -> None:
        """Raises ParameterError if the longest rollout of a prompt exceeds the engine's context."""
        super()._require_positions(prompt_tokens)
        needed = prompt_tokens + self.decoding.max_steps
        if needed > self.engine.positions:
            raise ParameterError(
                f"{PARAMS}: policy.max_steps: a prompt of {prompt_tokens} tokens and "
                f"{self.decoding.max_steps} steps need {needed} positions, vLLM has "
                f"{self.engine.positions}; lower max_steps or shorten the prompts"
            )

    def _count_sampling(self, trajectory: TokenTrajectory) -> None:
        """Adds the cost of cached sampling: each prompt once, then one position per step."""
        lengths = trajectory.prompt_mask.sum(dim=1)
        for length in lengths.tolist():
            self._count(Pass(rows=1, query=length, context=length, logits=1))
        read = trajectory.mask.sum(dim=1) - 1  # the last token is not an input
        for length, count in zip(lengths[trajectory.group].tolist(), read.tolist()):
            mean_context = length + (count + 1) / 2
            self._count(Pass(rows=count, query=1, context=round(mean_context), logits=1))
        self.cost += Cost(sampled_steps=int(trajectory.mask.sum()))


def _lost(when: str, error: ConnectionError) -> WorkerError:
    return WorkerError(
        f"policy.sampler vllm: the engine was lost {when} ({error}); if memory ran out, lower "
        "policy.vllm.memory_share or the number of workers, then rerun: finished batches are kept"
    )
