"""A pipeline whose rollouts, later iterations and evaluations come from a vLLM server."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from benchmarks.workspaces import commands_in_order, make_workspace, run_stages
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import read_json
from grpo.sampling.rollouts import read_batch
from grpo.wiring.policies import draws_of_round, load_policy
from tests.pipeline.processes import Finished, run_stage
from tests.pipeline.test_vllm import largest_difference
from tests.pipeline.workspaces import cut_short, two_arms
from tests.rewards.servers import Response, as_json, serving_paths
from tests.vllm_python import require_vllm
from tests.vllm_servers import VllmServer, vllm_server

pytestmark = pytest.mark.long

NAME = "uniform-1"
BASE, ROLLOUTS = "artifacts/policies/base", f"artifacts/rollouts/{NAME}"
TRAINING = f"artifacts/training/{NAME}"
TOLERANCE = 0.005  # nats per step
COMPLETIONS = "/v1/completions"
NO_URL = "http://127.0.0.1:1"  # of stages that ask no server
OF_A_BATCH = 16  # rollouts


def params_for(url: str, shared: Path, **changes: Any) -> dict[str, Any]:
    params = cut_short(two_arms(), [NAME])
    params["arms"] = {"uniform": params["arms"]["uniform"]}
    params["policy"]["base"]["config"] |= {"head_dim": 32, "tie_word_embeddings": False}
    params["policy"]["base"]["warmup"]["updates"] = 200  # some rollouts are right, some wrong
    params["policy"] |= {
        "sampler": "vllm_server",
        "server": {
            "url": url,
            "concurrency": 16,
            "timeout_seconds": 60.0,
            "retries": 2,
            "retry_seconds": 0.1,
            "directory": str(shared),
            **changes,
        },
    }
    params["sampling"] = {"executor": "processes", "workers": 2}
    arm = params["arms"]["uniform"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 16}},
        {"fix_group_size": {"rollouts": 8}},
    ]
    arm["sampling"]["rollouts_per_batch"] = OF_A_BATCH
    # The first update moves log-probs far more than engines differ.
    arm["training"] |= {
        "iterations_per_round": 2,
        "updates_per_iteration": 1,
        "learning_rate": 0.02,
    }
    return params


@pytest.fixture(scope="module", autouse=True)
def _python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        require_vllm(monkeypatch)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the servers and their samplers see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """A workspace with a base, which no server has sampled from."""
    return make_base(tmp_path_factory.mktemp("vllm") / "fresh", params_for(NO_URL, shared))


def make_base(workspace: Path, params: dict[str, Any]) -> Path:
    make_workspace(workspace, params)
    run_until(workspace, "base")
    return workspace


def run_until(workspace: Path, last: str) -> None:
    """Runs the stages up to one of them, in this process."""
    names = list(commands(workspace))
    with quiet():
        run_stages(workspace, skipped=names[names.index(last) + 1 :])


def commands(workspace: Path) -> dict[str, str]:
    """Returns the command of each stage, in topological order."""
    with quiet(), chdir(workspace):
        return {name: command for name, command, _ in commands_in_order(Path())}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DVC
        yield


@pytest.fixture(scope="module")
def server(fresh: Path) -> Iterator[VllmServer]:
    with vllm_server(fresh / BASE) as running:
        yield running


def workspace_at(fresh: Path, target: Path, params: dict[str, Any]) -> Path:
    make_workspace(target, params)
    shutil.copytree(fresh / "artifacts", target / "artifacts")
    return target


@pytest.fixture(scope="module")
def finished(fresh: Path, server: VllmServer, shared: Path) -> Path:
    workspace = workspace_at(fresh, fresh.parent / "finished", params_for(server.url, shared))
    run_until(workspace, f"evaluate@{NAME}")
    return workspace


def base_of(workspace: Path) -> TokenPolicy:
    with chdir(workspace):
        params = read_params()
        base, draws = Path(BASE), draws_of_round(params, NAME)
        policy = load_policy(params, base=base, directory=base, draws=draws)
    assert isinstance(policy, TokenPolicy)
    return policy


def test_both_iterations_are_drawn_by_the_weights_that_they_train(finished: Path):
    """By two workers, which share the server."""
    base, training = base_of(finished), finished / TRAINING
    assert largest_difference(base, finished / ROLLOUTS) < TOLERANCE
    assert read_json(training / "summary.json")["drift_max"] < TOLERANCE
    assert largest_difference(base, training / "iteration-0001/rollouts") > 10 * TOLERANCE
    assert len(pd.read_csv(training / "updates.csv")) == 2


def test_a_server_with_other_weights_ends_the_round_before_its_first_update(
    fresh: Path, shared: Path, tmp_path: Path, server: VllmServer
):
    """It says that it has loaded the policy's weights, but keeps those of another model."""
    other = tmp_path / "other"
    make_base(other, params_for(NO_URL, shared) | {"seed": 1})
    done = server.ask("/collective_rpc", reload_from(other / BASE))
    assert done.status == 200

    def lie(path: str, body: Any) -> Response:
        if path.startswith("/collective_rpc"):
            return as_json({"results": [None]})
        return server.ask(path, body)

    with serving_paths(lie) as proxy:
        params = params_for(proxy.url, shared)
        workspace = workspace_at(fresh, tmp_path / "work", params)
        run_until(workspace, f"score@{NAME}")
        ended = run(workspace, f"train@{NAME}")
    # The server has the version of weights that it does not hold: later tests must load theirs.
    server.ask("/update_weight_version", {"new_version": "of a test"})
    assert ended.code == 2
    assert "U27: clip_surrogate needs a range above 3 times the drift" in ended.stderr
    assert "find out if the sampler holds other weights" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (workspace / "artifacts/policies" / NAME).exists()


def reload_from(directory: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}


def run(workspace: Path, stage: str) -> Finished:
    return run_stage(workspace, stage, commands(workspace)[stage], timeout_seconds=120)


def until_outage(server: VllmServer, counts: dict[str, int]) -> Callable[[str, Any], Response]:
    """Returns what stands before a server, which breaks down after a number of rollouts."""

    def respond(path: str, body: Any) -> Response:
        if path == COMPLETIONS:
            counts["asked"] += 1
            if counts["asked"] > counts["answered"]:
                return Response(b"overloaded", 503)
        return server.ask(path, body)

    return respond


def test_a_rerun_after_an_outage_asks_for_the_missing_batches_only(
    fresh: Path, finished: Path, shared: Path, tmp_path: Path, server: VllmServer
):
    counts = {"asked": 0, "answered": 10**6}
    with serving_paths(until_outage(server, counts)) as proxy:
        params = params_for(proxy.url, shared)
        params["sampling"] = {"executor": "local", "workers": 1}
        workspace = workspace_at(fresh, tmp_path / "work", params)
        run_until(workspace, "curriculum@uniform")
        counts |= {"asked": 0, "answered": 3 * OF_A_BATCH + 1}
        down = run(workspace, f"rollout@{NAME}")
        assert down.code == 1
        assert f"policy.server.url: {proxy.url}{COMPLETIONS}: HTTP 503" in down.stderr
        assert "rerun: finished batches are kept" in down.stderr
        assert "Traceback" not in down.stderr
        counts |= {"asked": 0, "answered": 10**6}
        again = run(workspace, f"rollout@{NAME}")
        assert again.code == 0, again.stderr
        rollouts = len(read_batch(workspace / ROLLOUTS).table)
        assert counts["asked"] == rollouts - 3 * OF_A_BATCH
    expected, found = (read_batch(each / ROLLOUTS) for each in (finished, workspace))
    assert torch.equal(found.tensors["tokens"], expected.tensors["tokens"])
    assert largest_difference(base_of(workspace), workspace / ROLLOUTS) < TOLERANCE
