"""Measures sampling by vLLM and by our own sampler on one thread of a CPU.

python -m benchmarks.vllm_sampling          # prints the table of the results
python -m benchmarks.vllm_sampling run      # needs vLLM: make vllm

Models of three sizes have random weights; the largest has the configuration of SmolLM2-135M. Both
samplers draw the same numbers of tokens for the same prompts, in turns, after a batch that is not
counted. Writes results/vllm_sampling.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.demo import RESULTS, ROOT, machine, revision_of
from grpo.modalities.shared.directories import save_base
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.modality import VllmParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.vllm import Engine, VllmPolicy
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.markdown import markdown_table
from grpo.wiring.policies import load_policy, load_sampler

NAME = "vllm_sampling"
REPEATS = 3
TEMPERATURE = 0.7
GROUP_SIZE = 8
PROMPT_CHARACTERS = 63  # and a token of the beginning
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
MIDDLE = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}
SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
CONFIGS: dict[str, dict[str, int]] = {
    "3 M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, **SMALL},
    "30 M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **MIDDLE},
    "135 M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, **SMOLLM2},
}
BATCHES = {"3 M": (16, 64), "30 M": (8, 32), "135 M": (2, 32)}  # prompts, tokens of a rollout
ENGINE = VllmParams(tensor_parallel_size=1, memory_share=0.05, prefix_caching=True, compiled=False)
Drawn = tuple[TokenTrajectory, torch.Tensor]


def main() -> None:
    """Measures, or prints what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("run", nargs="?", choices=["run"])
    out = RESULTS / f"{NAME}.json"
    if parser.parse_args().run:
        torch.set_num_threads(1)
        sizes = {name: measure(name) for name in CONFIGS}
        command = f"python -m benchmarks.{NAME} run"
        about = {"command": command, "revision": revision_of("HEAD"), "machine": machine()}
        write_json(out, {**about, "repeats": REPEATS, "temperature": TEMPERATURE, "sizes": sizes})
    print(table(read_json(out)))


def measure(name: str) -> dict[str, Any]:
    """Returns what both samplers took for a model, by sampler, and how far log-probs differ."""
    params = _params()
    num_prompts, steps = BATCHES[name]
    decoding = Decoding(temperature=TEMPERATURE, max_steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        num_parameters = _save_model(base, CONFIGS[name])
        own = load_policy(params, base=base, directory=base, draws=decoding)
        start = time.perf_counter()
        vllm = load_sampler(params, base=base, directory=base, draws=decoding)
        start_seconds = time.perf_counter() - start
        assert isinstance(own, TokenPolicy)
        assert isinstance(vllm, VllmPolicy)
        assert isinstance(vllm.engine, Engine)
        engine = psutil.Process(vllm.engine.process_id)
        samplers: dict[str, TokenPolicy] = {"own": own, "vllm": vllm}
        seconds: dict[str, list[dict[str, float]]] = {each: [] for each in samplers}
        for policy in samplers.values():
            policy.end_tokens = torch.tensor([], dtype=torch.long)  # all rollouts have all steps
            _sample(policy, num_prompts, seed=REPEATS)
        for repeat in range(REPEATS):
            for each, policy in samplers.items():
                draw = partial(_sample, policy, num_prompts, seed=repeat)
                seconds[each].append(_timed(draw, engine if each == "vllm" else None))
        drawn, logp = _sample(vllm, num_prompts, seed=0)
        with torch.no_grad():
            differences = (own.log_prob(drawn) - logp).abs()
        update = _timed(lambda: vllm.load_weights(base / "model.safetensors"), engine)
        vllm.engine.stop()
    return {
        "parameters": num_parameters,
        "prompts": num_prompts,
        "group_size": GROUP_SIZE,
        "tokens": num_prompts * GROUP_SIZE * steps,
        "seconds": seconds,
        "start_seconds": round(start_seconds, 2),
        "update_seconds": update["wall"],
        "logp_difference": {"mean": float(differences.mean()), "max": float(differences.max())},
    }


def _params() -> Parameters:
    params = read_params(ROOT / "params.yaml")
    policy = params.policy.model_copy(update={"sampler": "vllm", "vllm": ENGINE, "lora": None})
    return params.model_copy(update={"policy": policy})


def _save_model(directory: Path, config: dict[str, int]) -> int:
    """Writes a model with random weights and returns the number of its parameters."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    settings = LlamaConfig(
        **config,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(settings)
    save_base(directory, model, tokenizer)
    return int(model.num_parameters())


def _sample(policy: TokenPolicy, num_prompts: int, *, seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    prompts = [chr(97 + index) * PROMPT_CHARACTERS for index in range(num_prompts)]
    return policy.sample(prompts, group_sizes=[GROUP_SIZE] * num_prompts, generator=generator)


def _timed(call: Callable[[], object], engine: psutil.Process | None) -> dict[str, float]:
    """Returns the seconds of a call, and those of the processor in this process and the engine."""
    start, cpu = time.perf_counter(), _cpu_seconds(engine)
    call()
    wall = time.perf_counter() - start
    return {"wall": round(wall, 4), "cpu": round(_cpu_seconds(engine) - cpu, 4)}


def _cpu_seconds(engine: psutil.Process | None) -> float:
    spent = time.process_time()
    if engine is not None:
        times = engine.cpu_times()
        spent += times.user + times.system
    return spent


def table(results: dict[str, Any]) -> str:
    """Returns the results as the Markdown table of docs/own-model.md."""
    rows = []
    for name, size in ((each, results["sizes"][each]) for each in CONFIGS):
        tokens, cells = size["tokens"], list[str]()
        for each in ("own", "vllm"):
            rates = sorted(tokens / repeat["cpu"] for repeat in size["seconds"][each])
            cells.append(f"{median(rates):.0f} [{rates[0]:.0f}, {rates[-1]:.0f}]")
        cells += [f"{_ratio(size, kind):.2f}x" for kind in ("cpu", "wall")]
        cells += [f"{size['update_seconds']:.2f}", f"{size['logp_difference']['max']:.1e}"]
        rows.append([name, *cells])
    titles = ["parameters", "own: tokens per CPU s", "vLLM: tokens per CPU s"]
    titles += ["vLLM to own, CPU s", "vLLM to own, wall"]
    return markdown_table([*titles, "s per update of weights", "largest difference, nats"], rows)


def _ratio(size: dict[str, Any], kind: str) -> float:
    """Returns how many times as many tokens per second vLLM samples: the median over repeats."""
    pairs = zip(size["seconds"]["own"], size["seconds"]["vllm"], strict=True)
    return float(median(own[kind] / vllm[kind] for own, vllm in pairs))


if __name__ == "__main__":
    main()
