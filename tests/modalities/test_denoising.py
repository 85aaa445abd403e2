"""Denoising policies of a real diffusers class: sampling, scoring, storage, cost."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo.errors import ArtifactError, MissingExtraError
from grpo.modalities.denoising.pipelines import save_pipeline, to_pixels, to_state
from grpo.modalities.denoising.trajectories import DenoisingTrajectory
from grpo.modalities.modality import Lora
from grpo.modalities.shared.directories import (
    PolicyState,
    gather_trained,
    read_trainable,
    save_trained,
    write_state,
)
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.packed import select_packed
from grpo.objective.base import chain, loss_terms, scalar_loss
from grpo.objective.trust import scale_log_ratio, weigh_log_prob
from grpo.types import Cost, Credit
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny_denoiser import (
    CAPTIONS,
    reload,
    seeded,
    tiny_denoiser,
    tiny_params,
)

SIZES = [3, 2, 2]
DENSITIES = ("flow_sde", "constant_sde", "interpolated_sde", "preserving")
ONE = {"stochastic": "one_per_prompt"}


def conditions_of(trajectory: DenoisingTrajectory, rows: Tensor) -> dict[str, Tensor]:
    prompts = trajectory.group[rows]
    return {name: each[prompts] for name, each in trajectory.conditions.items()}


def sampled(**settings: Any):
    policy = tiny_denoiser(**settings)
    return policy, *policy.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_scoring_gives_the_log_probs_of_sampling_bit_by_bit(density: str, guidance: float):
    policy, trajectory, logp = sampled(density=density, guidance=guidance)
    with torch.no_grad():
        for step in range(4):  # the rows of a step together, as they were sampled
            needed = trajectory.mask & (torch.arange(5) == step)
            assert torch.equal(policy.log_prob(trajectory, needed)[:, step], logp[:, step])
        whole = policy.log_prob(trajectory)
    torch.testing.assert_close(whole, logp, rtol=1e-5, atol=1e-3)
    assert (logp[:, 4] == 0).all()


@pytest.mark.parametrize("stochastic", ["all", "one_per_prompt", "none"])
def test_the_rollouts_of_a_prompt_have_noise_at_the_same_steps(stochastic: str):
    policy, trajectory, _ = sampled(stochastic=stochastic, window=(1, 4))
    counts = {"all": 3, "one_per_prompt": 1, "none": 0}
    assert (trajectory.mask.sum(dim=1) == counts[stochastic]).all()
    assert not trajectory.mask[:, [0, 4]].any()
    for prompt in range(len(CAPTIONS)):
        assert len(trajectory.mask[trajectory.group == prompt].unique(dim=0)) == 1
    assert len(trajectory.before) == len(trajectory.after) == int(trajectory.mask.sum())
    assert policy.cost.sampled_steps == sum(SIZES) * 5


def test_every_step_of_the_window_is_drawn_equally_often():
    """400 prompts, 4 steps: within four standard deviations of 100."""
    policy = tiny_denoiser(**ONE)
    mask = policy._choose_steps(torch.tensor([[0, 4]]).expand(400, 2), seeded())
    assert ((mask.sum(dim=0)[:4] - 100).abs() < 4 * (400 * 0.25 * 0.75) ** 0.5).all()


def test_without_noise_only_the_start_is_drawn():
    first, second = (sampled(stochastic="none")[1].media for _ in range(2))
    assert torch.equal(first, second)
    policy = tiny_denoiser(stochastic="none")
    other, _ = policy.sample(CAPTIONS, group_sizes=SIZES, generator=seeded(1))
    assert not torch.equal(first, other.media)


def test_guidance_of_one_is_none_and_leads_away_from_no_caption():
    plain = sampled(stochastic="none")[1].media
    guided = sampled(stochastic="none", guidance=4.0)[1].media
    is_blank = torch.tensor([0] * 3 + [0] * 2 + [1] * 2, dtype=torch.bool)
    assert not torch.equal(plain[~is_blank], guided[~is_blank])
    # The caption "" is what guidance leads away from: nothing to lead to.
    assert (plain[is_blank].int() - guided[is_blank].int()).abs().max() <= 1


def test_matched_log_probs_are_half_the_squared_error_of_the_velocity():
    """Of the image that the ODE drew, noised again to the step's time."""
    exact = sampled(stochastic="none")[1].media
    policy, trajectory, logp = sampled(density="matched", **ONE)
    plain = tiny_denoiser(density="matched", stochastic="all")
    drawn, _ = plain.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    assert torch.equal(drawn.media, exact)
    rows, steps = trajectory.mask.nonzero(as_tuple=True)
    time = policy.schedule().time[steps]
    velocity = policy._velocity(trajectory.before, time, conditions_of(trajectory, rows))
    error = (trajectory.after - velocity).double().flatten(1)
    constant = error.shape[1] * 0.5 * math.log(2 * math.pi)
    expected = -(error.square().sum(dim=1) / 2) - constant
    torch.testing.assert_close(logp[trajectory.mask].double(), expected, rtol=1e-5, atol=1e-3)
    # before = (1 - sigma) x0 + sigma x1 and after = x1 - x0: x0 is the image.
    image = trajectory.before - (time / 1000).view(-1, 1, 1, 1) * trajectory.after
    assert torch.equal(to_pixels(policy.pipeline, image), trajectory.media[rows])


def test_a_matched_objective_descends_the_error_weighed_by_the_advantage():
    policy, trajectory, logp = sampled(density="matched")
    advantage = torch.tensor([1.0, -1, 0.5, 1, -1, 1, -1])[:, None].expand(logp.shape)
    credit = Credit(advantage=advantage, weight=trajectory.mask / trajectory.mask.sum())
    terms = loss_terms(
        chain(scale_log_ratio(128), weigh_log_prob()),
        logp=policy.log_prob(trajectory),
        proximal_logp=logp,
        reference_logp=None,
        credit=credit,
    )
    scalar_loss(terms, credit).backward()
    ours = policy.model.proj_out.weight.grad.clone()
    policy.model.zero_grad()
    rows, steps = trajectory.mask.nonzero(as_tuple=True)
    time = policy.schedule().time[steps]
    velocity = policy._velocity(trajectory.before, time, conditions_of(trajectory, rows))
    error = (trajectory.after - velocity).square().flatten(1).mean(dim=1) / 2
    (error * advantage[rows, 0]).mean().backward()
    torch.testing.assert_close(ours, policy.model.proj_out.weight.grad, rtol=1e-4, atol=1e-8)


def test_a_step_without_noise_has_no_log_prob():
    policy, trajectory, _ = sampled(**ONE)
    with pytest.raises(ValueError, match=r"U7: log_prob needs steps with noise"):
        policy.log_prob(trajectory, torch.ones_like(trajectory.mask))


@pytest.mark.parametrize("settings", [{}, ONE], ids=["all", "one"])
def test_a_stored_trajectory_comes_back(settings: dict[str, Any]):
    policy, trajectory, logp = sampled(**settings)
    group = trajectory.group * 7 + 3
    stored = trajectory.pack(logp)
    back, behavior = policy.unpack(stored, group)
    assert torch.equal(behavior, logp)
    for name in ("group", "mask", "before", "after", "media"):
        assert torch.equal(getattr(back, name), getattr(trajectory, name)), name
    for ours, each in zip(back.noise, trajectory.noise, strict=True):
        assert torch.equal(ours, each)
    for name, each in trajectory.conditions.items():
        assert torch.equal(back.conditions[name], each)


@pytest.mark.parametrize("settings", [{}, ONE], ids=["all", "one"])
def test_some_of_what_is_stored_is_what_was_drawn_of_it(settings: dict[str, Any]):
    policy, trajectory, logp = sampled(**settings)
    kept = torch.tensor([False, True, True, False, False, True, True])
    stored = select_packed(policy.layout, trajectory.pack(logp), trajectory.group, kept)
    back, behavior = policy.unpack(stored, trajectory.group[kept])
    chosen = trajectory.select(kept.nonzero()[:, 0], 5)
    assert torch.equal(behavior, logp[kept])
    assert torch.equal(back.before, chosen.before)
    assert torch.equal(policy.log_prob(back), policy.log_prob(chosen))


def test_a_selection_is_scored_as_in_the_whole():
    policy, trajectory, _ = sampled()
    rows = torch.tensor([4, 1])
    part = policy.log_prob(trajectory.select(rows, 3))
    torch.testing.assert_close(part, policy.log_prob(trajectory)[rows, :3], rtol=1e-5, atol=1e-3)


def test_a_group_with_noise_at_different_steps_is_refused():
    policy, trajectory, logp = sampled(**ONE)
    stored = trajectory.pack(logp)
    stored["step_index"][1] = (stored["step_index"][0] + 1) % 4
    with pytest.raises(ArtifactError, match="U4: group 0 has noise at different steps"):
        policy.unpack(stored, trajectory.group)


@pytest.mark.parametrize("wrong", [-1, 4, 9])
def test_a_step_that_cannot_have_noise_is_refused(wrong: int):
    policy, trajectory, logp = sampled()
    stored = trajectory.pack(logp)
    stored["step_index"][0] = wrong
    with pytest.raises(ArtifactError, match="step_index must name a rollout's steps once each"):
        policy.unpack(stored, trajectory.group)
    stored["step_index"][0] = stored["step_index"][1]
    with pytest.raises(ArtifactError, match="step_index must name a rollout's steps once each"):
        policy.unpack(stored, trajectory.group)


@pytest.mark.parametrize("name", ["media", "before", "condition.pooled_projections"])
def test_what_does_not_fit_is_named(name: str):
    policy, trajectory, logp = sampled()
    stored = trajectory.pack(logp)
    cut = {**stored, name: stored[name][:-1]}
    with pytest.raises(ArtifactError, match=f"{name} must have .* entries"):
        policy.unpack(cut, trajectory.group)
    with pytest.raises(ArtifactError, match=r"must hold .*, got"):
        policy.unpack({key: each for key, each in stored.items() if key != name}, trajectory.group)


def test_flops_are_those_torch_counts():
    policy, trajectory, _ = sampled()
    _ = policy._training_flops
    before = policy.cost.flops
    counter = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    with counter:
        policy.log_prob(trajectory).sum().backward()
    assert policy.cost.flops - before == counter.get_total_flops()


@pytest.mark.parametrize("num_steps", [10, 20, 40])
def test_an_update_of_one_step_costs_the_same_for_any_number_of_steps(num_steps: int):
    """FLOPs and stored numbers of one step per prompt, and of all: constant, and in proportion."""
    counts = {}
    for stochastic in ("one_per_prompt", "all"):
        policy, trajectory, logp = sampled(
            num_steps=num_steps, stochastic=stochastic, window=(0, num_steps)
        )
        policy.cost = Cost()
        policy.log_prob(trajectory).sum().backward()
        size = sum(each.numel() for each in trajectory.pack(logp).values())
        fixed = trajectory.media.numel() + sum(e.numel() for e in trajectory.conditions.values())
        fixed += 2 * sum(SIZES)  # how many steps have noise, and which variant it was
        counts[stochastic] = policy.cost.flops / policy._training_flops, size - fixed
    one, every = counts["one_per_prompt"], counts["all"]
    assert one[0] == sum(SIZES)
    assert every == (one[0] * (num_steps - 1), one[1] * (num_steps - 1))


@pytest.mark.parametrize(
    "lora", [None, Lora(rank=2, alpha=4, dropout=0.0, target_modules=["to_q"])]
)
def test_a_trained_policy_continues_as_if_never_stored(tmp_path: Path, lora: Lora | None):
    params = tiny_params(lora=lora)
    base = tmp_path / "base"
    save_pipeline(base, tiny_denoiser().pipeline)
    write_state(base, PolicyState(name="base"))
    policy = reload(base, base, params)
    trajectory, _ = policy.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    optimizer = make_optimizer(policy.model, params.arms["flow"].training)

    def step(policy: Any, optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        (policy.log_prob(trajectory).sum() / 1e3).backward()
        optimizer.step()
        with torch.no_grad():
            return policy.log_prob(trajectory)

    step(policy, optimizer)
    state = PolicyState(name="a", arm="flow")
    save_trained(tmp_path / "a", gather_trained(policy.model, optimizer), state)
    again = reload(tmp_path / "a", base, params)
    restored = make_optimizer(again.model, params.arms["flow"].training)
    read_trainable(tmp_path / "a", again.model, restored)
    assert torch.equal(step(again, restored), step(policy, optimizer))


def test_a_directory_without_weights_is_named(tmp_path: Path):
    save_pipeline(tmp_path / "base", tiny_denoiser().pipeline)
    (tmp_path / "base/transformer/diffusion_pytorch_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ArtifactError, match="base: must be a complete policy directory"):
        reload(tmp_path / "base", tmp_path / "base", tiny_params())


def test_pixels_and_states_are_inverse():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(to_pixels(tiny_denoiser().pipeline, to_state(pixels)), pixels)


def test_a_caption_reaches_the_pooled_condition():
    """CLIP pools at the end token: captions that differ must pool differently."""
    policy = tiny_denoiser()
    pooled = policy._encode(["2A", "A2", "2A"])["pooled_projections"]
    assert torch.equal(pooled[0], pooled[2])
    assert not torch.allclose(pooled[0], pooled[1])


def test_the_densities_differ_but_share_their_marginal_mean():
    """All start from one noise; with hardly any noise in the steps all end at the ODE's image."""
    exact = sampled(stochastic="none")[1].media.int()
    for density in DENSITIES:
        policy = tiny_denoiser(density=density, noise_level=1e-4)
        start = seeded()
        trajectory, _ = policy.sample(CAPTIONS, group_sizes=SIZES, generator=start)
        assert (trajectory.media.int() - exact).abs().max() <= 2


@pytest.mark.parametrize(
    "module", ["grpo.modalities.denoising.bases", "grpo.modalities.denoising.policy"]
)
def test_without_diffusers_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str
):
    between = [
        "grpo.modalities.denoising.bases",
        "grpo.modalities.denoising.policy",
        "grpo.modalities.denoising.pipelines",
    ]
    for name in [module, *between]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtraError, match=r"policy\.kind denoising needs diffusers; run pip"):
        importlib.import_module(module)
