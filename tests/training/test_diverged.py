"""Training that diverges ends in one line, whatever diverges, and never leaves a policy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo.errors import ArtifactError, DivergedError
from grpo.modalities.action_chunks.bases import CloningSettings, clone_demonstrations
from grpo.modalities.action_chunks.model import encode_instructions
from grpo.modalities.denoising.flow_matching import Drawings, match_flow
from grpo.modalities.shared.directories import load_base, save_base
from grpo.modalities.shared.drawings import Drawing, draw_texts
from grpo.modalities.shared.logits import draw
from grpo.modalities.shared.optimizer import PreciseAdamW, take_step
from grpo.modalities.shared.warmup import WarmupSettings, WarmupUpdate, warm_up
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.objective.algorithms import rloo
from grpo.report.diverged import read_divergences
from grpo.runtime.artifacts.divergence import curves_kept
from grpo.runtime.artifacts.files import Scratch
from grpo.runtime.artifacts.tensors import read_tensors, write_tensors
from grpo.sampling.drawing import local_executor, sample_rollouts
from grpo.training.updates import Iteration, run_updates
from grpo.wiring.policies import make_optimizer
from tests.modalities.test_cloning import TOKENIZER, demonstrations
from tests.modalities.tiny import rewarded, seeded, tiny_policy
from tests.modalities.tiny_actor import tiny_model
from tests.modalities.tiny_denoiser import tiny_denoiser
from tests.training.test_training import TRAINING, sampled_round, settings_of


def train(
    *,
    learning_rate: float,
    updates: int,
    scale: float = 1.0,
) -> TokenPolicy:
    """Trains a round whose rewards are 0 and `scale`, and returns the policy."""
    policy, rollouts, trajectory = sampled_round()
    objective = rloo()
    run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rewarded(trajectory, rollouts.behavior_logp, scale * rollouts.reward),
            objective=objective,
            objective_state=objective.init(),
            optimizer=make_optimizer(
                policy.model, TRAINING.model_copy(update={"learning_rate": learning_rate})
            ),
            settings=replace(settings_of(), updates_per_iteration=updates),
            first_update=5,
            generator=seeded(),
        ),
        scratch=Scratch("train", "round"),
        progress=lambda done, total: None,
    )
    return policy


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    "learning_rate",
    [1e3, pytest.param(1e15, marks=pytest.mark.long), 1e30],
)
def test_a_learning_rate_that_destroys_the_policy_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning_rate: float, updates: int
):
    """Also if the last update does it, after which nothing else would look."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DivergedError, match=r"^update [56]: .* (is (nan|inf)|change by)"):
        train(learning_rate=learning_rate, updates=updates)


@pytest.mark.long
@pytest.mark.parametrize("learning_rate", [1e4, 1e8])
def test_a_policy_whose_last_norm_overflows_is_finite_and_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning_rate: float
):
    """A limit of the check: all logits are 0, and log-probs change by less than a nat."""
    monkeypatch.chdir(tmp_path)
    policy = train(learning_rate=learning_rate, updates=1)
    assert not policy.model(torch.tensor([[1, 2, 3]])).logits.any()


def test_rewards_whose_squares_overflow_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DivergedError, match=r"^update [56]: (advantage|gradient norm|log-probs) "):
        train(learning_rate=1e-3, updates=2, scale=1e38)


def test_the_error_brings_the_updates_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DivergedError) as raised:
        train(learning_rate=1e3, updates=2)
    updates = [each["update"] for each in raised.value.updates]
    assert updates in ([5], [5, 6])


def warm_up_tokens(settings: WarmupSettings) -> Iterator[WarmupUpdate]:
    policy = tiny_policy()
    return warm_up(policy.model, policy.tokenizer, [("1+1=", "2"), ("2+2=", "4")], settings)


def clone(settings: WarmupSettings) -> Iterator[WarmupUpdate]:
    return clone_demonstrations(
        tiny_model(),
        lambda instructions: encode_instructions(TOKENIZER, instructions),
        demonstrations(),
        settings,
        CloningSettings(bin_spread=0.0, observation_noise=0.01),
    )


def match(settings: WarmupSettings) -> Iterator[WarmupUpdate]:
    pixels = draw_texts(["2", "7"], Drawing(8, 16, 8, 8))
    drawings = Drawings(captions=["2", "7"], pixels=torch.from_numpy(pixels))
    pipeline = tiny_denoiser(stochastic="none", num_steps=10).pipeline
    return match_flow(pipeline, drawings, settings, num_tokens=1, blank_fraction=0.0)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("learning_rate", [1e15, pytest.param(1e30, marks=pytest.mark.long)])
@pytest.mark.parametrize("warmup", [warm_up_tokens, clone, match])
def test_a_warm_up_that_destroys_its_model_ends(
    warmup: Callable[[WarmupSettings], Iterator[WarmupUpdate]], learning_rate: float, updates: int
):
    rate = 30 * learning_rate  # of which the first update takes a 30th
    sane = WarmupSettings(updates=updates, rows_per_update=2, learning_rate=3e-2, seed=0)
    assert len(list(warmup(sane))) == updates
    with pytest.raises(DivergedError, match=r"^update \d: "):
        list(warmup(replace(sane, learning_rate=rate)))


def spoil(policy: TokenPolicy, value: float) -> str:
    """Puts a number into one weight of a policy, and returns the weight's name."""
    with torch.no_grad():
        policy.model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = value
    return r"'model\.layers\.1\.mlp\.down_proj\.weight' must be finite, got .* at \[3, 5\]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_neither_written_nor_read(tmp_path: Path, value: float):
    policy = tiny_policy()
    save_base(tmp_path / "base", policy.model, policy.tokenizer)
    said = spoil(policy, value)
    with pytest.raises(ArtifactError, match=said):
        save_base(tmp_path / "other", policy.model, policy.tokenizer)
    policy.model.save_pretrained(tmp_path / "base")
    with pytest.raises(ArtifactError, match=rf"base: tensor {said}"):
        load_base(tmp_path / "base", torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_drawing_from_weights_that_are_not_finite_is_one_line(tmp_path: Path, value: float):
    policy = tiny_policy()
    spoil(policy, value)
    prompts = pd.DataFrame({"prompt_id": ["p", "q"], "prompt": ["1+1=", "2+2="], "rollouts": 3})
    with pytest.raises(ArtifactError, match=r"^policies/a: log-probs must be finite, .*'[pq]'"):
        sample_rollouts(
            local_executor(policy, Path("policies/a")),
            prompts,
            rollouts_per_batch=8,
            seed=0,
            scratch=tmp_path,
        )


@given(
    vocabulary=st.sampled_from([2, 127, 512, 513, 640, 1000]),
    value=st.sampled_from([float("nan"), float("inf")]),
    place=st.floats(0, 1, exclude_max=True),
    uniform=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_logits_that_are_not_finite_draw_a_token_of_log_prob_nan(
    vocabulary: int, value: float, place: float, uniform: float
):
    logits = torch.randn(2, vocabulary, generator=seeded())
    logits[1, int(place * vocabulary)] = value
    chosen, logp = draw(logits, torch.full((2,), uniform, dtype=torch.float64), 1.0)
    assert bool(((chosen >= 0) & (chosen < vocabulary)).all())
    assert logp.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_that_are_not_finite_are_neither_written_nor_read(
    tmp_path: Path, dtype: torch.dtype
):
    def with_number(number: float) -> dict[str, Tensor]:
        return {"a": torch.zeros(0), "b": torch.tensor([[0, 1, number]], dtype=dtype)}

    path = tmp_path / "t.safetensors"
    write_tensors(path, with_number(2.0))
    content = path.read_bytes()
    for number in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ArtifactError, match=r"t\.safetensors: tensor 'b' must be .* \[0, 2\]"):
            write_tensors(path, with_number(number))
        raw = with_number(number)["b"].view(torch.uint8).numpy().tobytes()
        path.write_bytes(content[: -len(raw)] + raw)
        with pytest.raises(ArtifactError, match=r"t\.safetensors: tensor 'b' must be .* \[0, 2\]"):
            read_tensors(path)
        path.write_bytes(content)


def test_a_step_whose_weights_overflow_is_named():
    weight = torch.ones(3, requires_grad=True)
    optimizer = PreciseAdamW([weight], lr=1e30)
    weight.grad = torch.ones(3)
    with pytest.raises(DivergedError, match=r"^update 3: norm of the weights is inf"):
        take_step(optimizer, 3)


def fail(*, updates: list[dict[str, float]]) -> None:
    with curves_kept("train@a-1"):
        raise DivergedError("update 2: loss is nan", updates)


def test_curves_are_kept_until_the_stage_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert read_divergences(["base", "train@a-1"]) == []
    for rows in ([], [{"update": 0, "loss": 0.5}, {"update": 1, "loss": 2.5}]):
        with pytest.raises(DivergedError):
            fail(updates=rows)
        (kept,) = read_divergences(["base", "train@a-1"])
        assert (kept.stage, kept.reason) == ("train@a-1", "update 2: loss is nan")
        assert kept.updates.to_dict("records") == rows
    with curves_kept("base"):  # another stage
        pass
    assert len(read_divergences(["base", "train@a-1"])) == 1
    with curves_kept("train@a-1"):
        pass
    assert read_divergences(["base", "train@a-1"]) == []
