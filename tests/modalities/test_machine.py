"""machine.dtype and machine.compile: the same log-probs and gradients, as near as numbers allow.

The tests compile with a backend that runs the captured graphs as they are: inductor's code needs a
C++ compiler, which a fresh machine may not have.
"""

import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.errors import ParameterError
from grpo.modalities.shared.directories import save_base
from grpo.modalities.tokens.forward import ForwardPasses
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.params.parameters import read_params
from grpo.runtime.machine import prepare_machine
from grpo.wiring.policies import load_policy
from tests.modalities.tiny import in_bfloat16, seeded, tiny_moe, tiny_policy

PARAMS = read_params(Path(__file__).parents[2] / "params.yaml")
PROMPTS, SIZES = ["G12,18=", "S1+2="], [4, 3]


def log_prob_and_gradient(
    policy: TokenPolicy, trajectory: TokenTrajectory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probs, and the gradient of their weighted sum in all parameters, flat."""
    logp = policy.log_prob(trajectory)
    weight = torch.randn(logp.shape, generator=seeded())
    gradient = torch.autograd.grad((weight * logp).sum(), list(policy.model.parameters()))
    return logp.detach(), torch.cat([each.flatten() for each in gradient]).float()


@pytest.mark.parametrize(
    "make", [tiny_policy, tiny_moe, partial(tiny_moe, routing="replay_sampled")]
)
def test_no_pass_reads_memory_that_nobody_has_written(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], TokenPolicy]
):
    """It is NaN in the first run, in the second what was there: no stage has torch fill it."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    runs = []
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        for fills in (True, False):
            monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
            policy = make()
            trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
            runs.append([trajectory.tokens, logp, *log_prob_and_gradient(policy, trajectory)])
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=True)
    for filled, found in zip(*runs):
        assert torch.equal(filled, found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.long
@pytest.mark.parametrize("shares", [True, False])
def test_compiled_passes_give_the_same_log_probs_and_gradients(shares: bool):
    """Within 1e-6 of the largest; a compiler may add in another order."""
    policy, graphs = tiny_policy(), []

    def capture(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    policy.forward.can_share = shares
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    expected = log_prob_and_gradient(policy, trajectory)
    policy.forward.compile(capture)
    policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    assert not graphs
    compiled = log_prob_and_gradient(policy, trajectory)
    assert len(graphs) == (2 if shares else 1)  # prompts, then rollouts
    for ours, plain in zip(compiled, expected):
        assert (ours - plain).abs().max() <= 1e-6 * plain.abs().max()


@pytest.mark.parametrize("compiles", [True, False])
def test_a_loaded_policy_is_compiled_if_the_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiles: bool
):
    backends: list[str] = []
    monkeypatch.setattr(ForwardPasses, "compile", lambda _, backend: backends.append(backend))
    machine = PARAMS.machine.model_copy(update={"compile": compiles})
    policy = tiny_policy()
    save_base(tmp_path / "base", policy.model, policy.tokenizer)
    load_policy(
        PARAMS.model_copy(update={"machine": machine}),
        base=tmp_path / "base",
        directory=tmp_path / "base",
        draws=Decoding(temperature=1.0, max_steps=4),
    )
    assert backends == (["inductor"] if compiles else [])


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine = PARAMS.machine.model_copy(update={"compile": True})
    with pytest.raises(ParameterError) as caught:
        prepare_machine(machine)
    assert str(caught.value) == (
        "params.yaml: machine.compile true needs a C++ compiler, no-such-compiler, found none; "
        "install it or set false"
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator up")
def test_a_pass_uses_the_memory_that_the_last_one_freed():
    """Without it, 64 MiB come as 16384 pages of the system's each time.

    With it, a place that is large enough stays, though the first few may not fit the last one's.
    """
    prepare_machine(PARAMS.machine)
    faults = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 1000, faults


def test_bfloat16_gives_the_log_probs_and_the_direction_of_float32():
    """Within 1/8 nat and 1 % of the cosine: logits of up to 8 are 1/32 apart in 8 bits."""
    exact = tiny_policy()
    rounded = in_bfloat16(exact)
    trajectory, sampled = rounded.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    logp, gradient = log_prob_and_gradient(rounded, trajectory)
    expected, direction = log_prob_and_gradient(exact, trajectory)
    assert logp.dtype == sampled.dtype == torch.float32
    assert (logp - expected).abs().max() < 0.125
    assert (sampled - expected).abs().max() < 0.125
    assert torch.cosine_similarity(gradient, direction, dim=0) > 0.99


FREED = """
import psutil, torch
from grpo.runtime.machine import prepare_machine
from grpo.schema import Machine

prepare_machine(Machine(device="cpu", dtype="float32", threads=1, compile=False, memory_gb={limit}))
blocks = [torch.ones(2**18) for _ in range(256)]
full = psutil.Process().memory_info().rss
del blocks[::2]
print((full - psutil.Process().memory_info().rss) / (128 * 2**20))
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets glibc's allocator up")
@pytest.mark.parametrize(("limit", "returned"), [(24.0, 1.0), (None, 0.0)])
def test_blocks_freed_between_others_return_to_the_system_only_with_a_limit(
    limit: float | None, returned: float
):
    script = FREED.format(limit=limit)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert float(ended.stdout) == pytest.approx(returned, abs=0.1)
