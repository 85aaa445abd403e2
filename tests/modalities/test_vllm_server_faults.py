"""The sampler vllm_server on a server that answers, fails and loads weights as a test says."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.errors import ParameterError, RefusedError, ServerError, WorkerError
from grpo.modalities.shared.directories import save_base
from grpo.modalities.tokens.modality import VllmServerParams
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.files import sha256_of
from grpo.wiring.policies import load_sampler
from tests.modalities.tiny import seeded, tiny_policy
from tests.rewards.servers import Response, as_json, closed_url, serving_paths

ROOT = Path(__file__).parents[2]
PARAMS = read_params(ROOT / "params.yaml")
STEPS = 3
COMPLETIONS = "/v1/completions"
CONFIG = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "max_model_len": 64}


@dataclass
class Server:
    """The endpoints of vLLM's server; its rollouts follow from seeds."""

    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    # By path: answers instead, from the number of requests to it, None for the usual answer.
    fault: dict[str, Callable[[int], Response | None]] = field(default_factory=dict)
    version: str = "default"
    weights: list[str] = field(default_factory=list)  # hashes of what was loaded
    tries: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, path: str, body: Any) -> Response:
        path = path.partition("?")[0]
        with self.lock:
            self.tries[path] += 1
            count = self.tries[path]
        if path in self.fault and (found := self.fault[path](count)) is not None:
            return found
        match path:
            case "/server_info":
                device = {"device": "cpu"}
                return as_json(
                    {"vllm_config": {"model_config": self.config, "device_config": device}}
                )
            case "/weight_info":
                return as_json({"weight_version": self.version})
            case "/update_weight_version":
                self.version = body["new_version"]
                return as_json({"success": True})
            case "/collective_rpc":
                assert self.version == "loading"
                (file,) = Path(body["kwargs"]["weights_path"]).iterdir()
                self.weights.append(sha256_of(file))
                return as_json({"results": [None]})
            case "/reset_prefix_cache":
                return as_json({"success": True})
        assert path == COMPLETIONS
        tokens = [(body["seed"] + step) % 200 for step in range(STEPS)]
        return as_json({"choices": [choice_of(tokens)]})


def choice_of(tokens: list[int], **changes: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-1.5] * len(tokens)}
    return {"token_ids": tokens, "logprobs": logprobs, "finish_reason": "length", **changes}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("policies") / "base")


def write_base(directory: Path, *, seed: int = 0, tied: bool = False) -> Path:
    policy = tiny_policy(seed=seed, tie_word_embeddings=tied)
    save_base(directory, policy.model, policy.tokenizer)
    return directory


def params_of(url: str, directory: Path, **changes: Any) -> Parameters:
    usual = {"concurrency": 4, "timeout_seconds": 30.0, "retries": 2, "retry_seconds": 0.01}
    settings = VllmServerParams(url=url, directory=str(directory), **{**usual, **changes})
    policy = {"sampler": "vllm_server", "server": settings, "lora": None}
    return PARAMS.model_copy(update={"policy": PARAMS.policy.model_copy(update=policy)})


def sampler_of(params: Parameters, base: Path) -> TokenPolicy:
    draws = Decoding(temperature=1.0, max_steps=STEPS)
    policy = load_sampler(params, base=base, directory=base, draws=draws)
    assert isinstance(policy, TokenPolicy)
    return policy


@contextmanager
def sampling(
    server: Server, base: Path, directory: Path, **changes: Any
) -> Iterator[tuple[str, TokenPolicy]]:
    with serving_paths(server) as asked:
        yield asked.url, sampler_of(params_of(asked.url, directory, **changes), base)


def draw(policy: TokenPolicy) -> tuple[TokenTrajectory, torch.Tensor]:
    return policy.sample(["a", "b"], group_sizes=[2, 3], generator=seeded(0))


def test_rollouts_are_those_of_their_seeds_in_order(base: Path, tmp_path: Path):
    with sampling(Server(), base, tmp_path) as (_, policy):
        trajectory, logp = draw(policy)
        seeds = torch.randint(2**63 - 1, (5,), generator=seeded(0))
        assert trajectory.group.tolist() == [0, 0, 1, 1, 1]
        assert trajectory.tokens[:, 0].tolist() == [int(each) % 200 for each in seeds]
        assert logp.tolist() == [[-1.5] * STEPS] * 5


def test_weights_are_sent_once_and_again_after_an_update(base: Path, tmp_path: Path):
    server, file = Server(), base / "model.safetensors"
    with sampling(server, base, tmp_path) as (_, policy):
        draw(policy)
        draw(policy)
        assert server.weights == [sha256_of(file)]
        changed = write_base(tmp_path / "changed", seed=1) / "model.safetensors"
        policy.load_weights(changed)
        draw(policy)
        assert server.weights == [sha256_of(file), sha256_of(changed)]
        assert not list(tmp_path.glob("grpo-*/"))


def test_two_samplers_take_turns_with_their_weights(base: Path, tmp_path: Path):
    server = Server()
    other = write_base(tmp_path / "other", seed=1)
    with sampling(server, base, tmp_path) as (url, policy):
        second = sampler_of(params_of(url, tmp_path), other)
        for each in (policy, second, policy):
            draw(each)
        hashes = [sha256_of(each / "model.safetensors") for each in (base, other, base)]
        assert server.weights == hashes


def replaced_at(*tries: int) -> Callable[[Server], Callable[[int], Response | None]]:
    """Another program loads weights while the rollouts of some tries are sampled."""

    def fault_of(server: Server) -> Callable[[int], Response | None]:
        def fault(count: int) -> None:
            if count in tries:
                server.version = "of another program"

        return fault

    return fault_of


def test_rollouts_of_replaced_weights_are_drawn_again(base: Path, tmp_path: Path):
    server = Server()
    server.fault[COMPLETIONS] = replaced_at(2)(server)
    with sampling(server, base, tmp_path) as (_, policy):
        drawn, _ = draw(policy)
        assert server.tries[COMPLETIONS] == 10
        assert len(server.weights) == 2
        again, _ = draw(policy)
        assert torch.equal(drawn.tokens, again.tokens)


def test_weights_that_are_replaced_again_end_the_stage(base: Path, tmp_path: Path):
    server = Server()
    server.fault[COMPLETIONS] = replaced_at(2, 7)(server)
    with sampling(server, base, tmp_path) as (url, policy):
        with pytest.raises(
            WorkerError, match=r"dropped twice: its weights were replaced"
        ) as caught:
            draw(policy)
        assert url in str(caught.value)


def test_an_aborted_request_gives_no_short_rollout(base: Path, tmp_path: Path):
    server = Server()
    aborted = as_json({"choices": [choice_of([5], finish_reason="abort")]})
    server.fault[COMPLETIONS] = lambda count: aborted if count == 3 else None
    with sampling(server, base, tmp_path) as (_, policy):
        trajectory, _ = draw(policy)
        assert trajectory.mask.sum(dim=1).tolist() == [STEPS] * 5


@pytest.mark.parametrize("path", [COMPLETIONS, "/collective_rpc", "/weight_info"])
def test_a_failure_that_passes_changes_nothing(path: str, base: Path, tmp_path: Path):
    with sampling(Server(), base, tmp_path) as (_, policy):
        expected, _ = draw(policy)
    server = Server()
    server.fault[path] = lambda count: Response(b"oops", 500) if count == 1 else None
    with sampling(server, base, tmp_path) as (_, policy):
        drawn, _ = draw(policy)
    assert torch.equal(drawn.tokens, expected.tokens)


@pytest.mark.parametrize("path", [COMPLETIONS, "/collective_rpc", "/weight_info"])
def test_a_server_that_fails_ends_the_stage_after_its_retries(
    path: str, base: Path, tmp_path: Path
):
    server = Server()
    server.fault[path] = lambda count: Response(b"oops", 500)
    with sampling(server, base, tmp_path, concurrency=1) as (url, policy):
        with pytest.raises(ServerError, match=r"HTTP 500 oops; .*rerun") as caught:
            draw(policy)
        assert f"policy.server.url: {url}{path}:" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert server.tries[path] == 3
        del server.fault[path]
        draw(policy)  # and does not sample from half of the weights
        assert len(server.weights) == 1


def test_a_server_that_is_down_is_named(base: Path, tmp_path: Path):
    url = closed_url().removesuffix("/judge")
    with pytest.raises(ServerError, match=r"ConnectError.*start the server") as caught:
        sampler_of(params_of(url, tmp_path), base)
    assert url in str(caught.value)


def test_a_server_that_hangs_is_not_waited_for(base: Path, tmp_path: Path):
    server, go = Server(), threading.Event()
    server.fault[COMPLETIONS] = lambda count: as_json(go.wait(10))
    with sampling(server, base, tmp_path, timeout_seconds=0.1, retries=1) as (_, policy):
        with pytest.raises(ServerError, match=r"no response within 0\.1 seconds"):
            draw(policy)
        go.set()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"dtype": "torch.bfloat16"}, "it has bfloat16; start it with --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"max_model_len": None}, r"its /server_info is not that of vLLM 0\.32"),
    ],
    ids=["dtype", "log-probs without the temperature", "another version"],
)
def test_a_server_with_other_settings_is_refused(
    config: dict[str, Any], said: str, base: Path, tmp_path: Path
):
    with (
        pytest.raises(ParameterError, match=said),
        sampling(Server(config={**CONFIG, **config}), base, tmp_path),
    ):
        pass


def test_a_tied_output_layer_on_a_cpu_is_refused(tmp_path: Path):
    """vLLM would keep the packed copy of the weights before."""
    tied = write_base(tmp_path / "tied", tied=True)
    with (
        pytest.raises(ParameterError, match=r"tied to the embedding; set policy\.sampler"),
        sampling(Server(), tied, tmp_path),
    ):
        pass


def test_a_prompt_that_leaves_no_room_in_the_server_is_refused(base: Path, tmp_path: Path):
    server = Server(config={**CONFIG, "max_model_len": 10})
    with sampling(server, base, tmp_path) as (_, policy):
        with pytest.raises(ParameterError, match=r"policy\.max_steps: .* vLLM has 10"):
            policy.sample(["a long prompt"], group_sizes=[1], generator=seeded(0))
        assert server.tries[COMPLETIONS] == 0


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "no tokens", "finish_reason": "length"}]},
        {"choices": [choice_of([5, 6], logprobs={"token_logprobs": [-0.1]})]},
        {"choices": [choice_of([])]},
        [],
    ],
    ids=["another server", "a log-prob too few", "empty", "no object"],
)
def test_an_answer_without_tokens_and_log_probs_is_refused(answer: Any, base: Path, tmp_path: Path):
    server = Server(fault={COMPLETIONS: lambda count: as_json(answer)})
    with (
        sampling(server, base, tmp_path) as (_, policy),
        pytest.raises(RefusedError, match="no tokens with log-probs in"),
    ):
        draw(policy)


def test_a_key_is_sent_and_appears_nowhere(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SAMPLER_KEY", "token-of-a-test")
    server = Server()
    server.fault[COMPLETIONS] = lambda count: Response(b"not token-of-a-test", 401)
    with serving_paths(server) as asked:
        policy = sampler_of(params_of(asked.url, tmp_path, key_variable="SAMPLER_KEY"), base)
        with pytest.raises(RefusedError, match=r"HTTP 401 not \*\*\*; start vLLM's server as"):
            draw(policy)
        assert set(asked.keys) == {"Bearer token-of-a-test"}
        monkeypatch.delenv("SAMPLER_KEY")
        with pytest.raises(ParameterError, match=r"policy\.server\.key_variable: .*SAMPLER_KEY"):
            sampler_of(params_of(asked.url, tmp_path, key_variable="SAMPLER_KEY"), base)


def test_a_directory_that_cannot_be_written_is_refused(base: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ParameterError, match=r"policy\.server\.directory: must be a directory"),
        sampling(Server(), base, tmp_path / "file"),
    ):
        pass
