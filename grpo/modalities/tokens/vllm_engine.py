"""A vLLM engine that serves a socket: `PYTHON -P vllm_engine.py DESCRIPTOR`.

It runs alone, by the Python of vLLM's environment, which needs vllm, torch and safetensors, but
nothing of this package. A message is a line of JSON and tensors as bytes of safetensors.
"""

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

PARENT = os.getppid()
POLL_SECONDS = 1.0  # between checks that the parent is alive
TOKEN_DTYPE = torch.int32
ENVIRONMENT = {  # of vLLM, unless the user has set it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process: draws can be repeated
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the processors of a host
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",  # no telemetry
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Message(NamedTuple):
    """A request or an answer."""

    header: dict[str, Any]  # JSON-serializable
    tensors: Mapping[str, Tensor] = {}


def write_message(stream: BufferedRWPair, message: Message) -> None:
    """Writes a message; raises ConnectionError if nobody reads it."""
    content = save(dict(message.tensors))
    line = json.dumps({**message.header, "bytes": len(content)})
    stream.write(line.encode() + b"\n" + content)
    stream.flush()


def read_message(stream: BufferedRWPair) -> Message:
    """Returns the next message; raises ConnectionError if the other process has ended."""
    line = stream.readline()
    header = json.loads(line) if line.endswith(b"\n") else {}
    content = stream.read(header.pop("bytes")) if header else b""
    if not content:
        raise ConnectionResetError
    return Message(header, load(content))


class WeightLoader:
    """What the engine's worker, of which this becomes a base class, can do beside vLLM's own."""

    model_runner: Any  # of vLLM's worker, as below
    reload_weights: Any

    def load_file(self, path: str) -> None:
        """Loads the weights in a safetensors file into the model in place."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.reload_weights(weights_iterator=load_file(path).items())
        # On a CPU, an output layer computes with a packed copy of its weight. vLLM renews the copy
        # of layers that have weights in the file, which an output layer tied to the embedding has
        # not. Elsewhere this does nothing.
        for layer in self.model_runner.model.modules():
            if isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)


class _Server:
    """Carries out the requests of a policy."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._is_asleep = False

    def start(self, asked: Message) -> Message:
        """Starts the engine; returns the settings that it has received."""
        import vllm
        from vllm.platforms import current_platform

        settings = asked.header["settings"]
        memory = _memory(settings, is_cpu=current_platform.is_cpu())
        self._engine = vllm.LLM(
            model=settings["directory"],
            dtype=settings["dtype"],
            tensor_parallel_size=settings["tensor_parallel_size"],
            enable_prefix_caching=settings["prefix_caching"],
            # A prompt that is read in parts needs a generator with an offset, which CPUs lack.
            enable_chunked_prefill=False if current_platform.is_cpu() else None,
            enforce_eager=not settings["compiled"],
            skip_tokenizer_init=True,  # tokens in, tokens out
            seed=0,
            # Log-probs at the decoding temperature instead of those of the raw logits.
            logprobs_mode="processed_logprobs",
            worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__name__}",
            enable_sleep_mode=not current_platform.is_cpu(),
            use_tqdm_on_load=False,
            **memory,
        )
        config = self._engine.llm_engine.vllm_config
        received = {
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "compiled": not config.model_config.enforce_eager,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            **memory,
        }
        return Message({"received": received, "positions": config.model_config.max_model_len})

    def generate(self, asked: Message) -> Message:
        """Returns a rollout per seed, one after the other, with log-probs in nats."""
        import vllm

        decoding = asked.header["decoding"]
        prompts = asked.tensors["tokens"].split(asked.tensors["lengths"].tolist())
        group, seeds = asked.tensors["group"].tolist(), asked.tensors["seeds"].tolist()
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompts[row].tolist()} for row in group],
            [
                vllm.SamplingParams(
                    temperature=decoding["temperature"],
                    max_tokens=decoding["max_steps"],
                    stop_token_ids=decoding["end_tokens"],
                    seed=seed,
                    logprobs=0,  # of the sampled token only
                    flat_logprobs=True,
                    detokenize=False,
                )
                for seed in seeds
            ],
            use_tqdm=False,
        )
        drawn = [output.outputs[0] for output in outputs]
        return Message(
            {},
            {
                "tokens": _concatenate([each.token_ids for each in drawn], TOKEN_DTYPE),
                "logp": _concatenate([each.logprobs.logprobs for each in drawn], torch.float32),
                "steps": torch.tensor([len(each.token_ids) for each in drawn]),
            },
        )

    def load(self, asked: Message) -> Message:
        """Replaces the weights, wakes an engine that sleeps, and forgets cached prefixes."""
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._engine.collective_rpc("load_file", args=(asked.header["path"],))
        if self._is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
        self._is_asleep = False
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM has kept the prefix cache of the weights before")
        return Message({})

    def sleep(self, asked: Message) -> Message:
        """Frees the memory of weights and cache; on a CPU, vLLM keeps both."""
        self._engine.sleep(level=2)
        self._is_asleep = True
        return Message({})


def _memory(settings: Mapping[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's setting of memory for a share of what is free.

    vLLM's own share is of all memory, and a trainer may keep weights on the same GPU. On a CPU the
    ranks of an engine have one memory, and the cache gets what weights leave.
    """
    share, ranks = settings["memory_share"], settings["tensor_parallel_size"]
    if not is_cpu:
        free, total = torch.cuda.mem_get_info()
        return {"gpu_memory_utilization": share * free / total}
    import psutil  # vLLM depends on it

    weights = sum(each.stat().st_size for each in Path(settings["directory"]).glob("*.safetensors"))
    cache = share * psutil.virtual_memory().available - weights
    if cache <= 0:
        raise ValueError(f"memory_share {share} of the free memory is less than the weights need")
    return {"kv_cache_memory_bytes": int(cache / ranks)}


def _concatenate(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.tensor(list(row), dtype=dtype) for row in rows])


def _end_with(connection: socket.socket) -> None:
    """Ends this process when the other end is closed, or its process, also during a request."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not poll.poll(POLL_SECONDS * 1000) and os.getppid() == PARENT:
        pass
    os._exit(0)  # vLLM's workers end with this process


def main(descriptor: int) -> None:
    """Serves requests, each the name of a method of `_Server`, until the other end is closed."""
    os.environ.update({name: each for name, each in ENVIRONMENT.items() if name not in os.environ})
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    stream, server = connection.makefile("rwb"), _Server()
    while True:
        asked = read_message(stream)
        try:
            answer = getattr(server, asked.header["do"])(asked)
        except Exception as error:  # noqa: BLE001  vLLM's exception types cannot be listed
            answer = Message({"error": f"{type(error).__name__}: {error}"})
        write_message(stream, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
