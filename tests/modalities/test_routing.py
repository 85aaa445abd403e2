"""Replayed routing: the experts that were chosen are chosen again, everything else stays live."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
)

from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.tokens.modality import RoutingMode
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from grpo.modalities.tokens.routing import find_routers, recorded
from grpo.objective.algorithms import rloo
from grpo.runtime.artifacts.files import Scratch
from grpo.training.frozen import compute_log_probs
from grpo.training.updates import Iteration, run_updates
from grpo.wiring.policies import make_optimizer
from tests.modalities.tiny import rewarded, seeded, tiny_moe, tiny_policy
from tests.training.test_training import TRAINING, settings_of

PROMPTS = ["G12,18=", "S1+2=", "a longer prompt="]
SIZES = [3, 2, 4]
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
REPLAYS: tuple[RoutingMode, ...] = ("replay_sampled", "replay_proximal")


def sampled(policy: TokenPolicy) -> tuple[TokenTrajectory, Tensor]:
    return policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())


def with_ties(policy: TokenPolicy, *, spread: float = 1e-7) -> TokenPolicy:
    """Makes three of four experts tie, of which at least one is taken and one is not."""
    for router in find_routers(policy.model):
        router.weight.data[2:] = router.weight[1].detach() * (1 + spread * torch.rand(2, 1))
    return policy


def copied(policy: TokenPolicy, *, routing: RoutingMode, dtype: torch.dtype) -> TokenPolicy:
    """Returns another engine with the same weights."""
    other = tiny_moe(routing=routing, dtype=dtype)
    other.model.load_state_dict(policy.model.state_dict())
    return other


def round_otherwise(policy: TokenPolicy) -> None:
    """Moves every weight in its last bits, as another kernel would move what comes of it.

    On some processors all of torch's own kernels agree.
    """
    for parameter in policy.model.parameters():
        parameter.data *= 1 + 1e-6 * torch.randn(parameter.shape, generator=seeded(7))


def experts_when_scored(policy: TokenPolicy, trajectory: TokenTrajectory) -> Tensor:
    """Returns what the routers choose for every position of a scored trajectory."""
    with recorded(policy.model) as passes, torch.no_grad():
        policy.log_prob(trajectory)
    return passes[0].unflatten(0, (len(trajectory.group), -1))


def was_read(trajectory: TokenTrajectory) -> Tensor:
    """Returns which positions of a scored trajectory hold a token that was read in sampling."""
    return torch.cat([trajectory.prompt_mask[trajectory.group], trajectory.mask[:, 1:]], dim=1)


def experts_of(trajectory: TokenTrajectory) -> Tensor:
    """Returns the recorded routing of every position of a scored trajectory."""
    width, num_read = trajectory.prompt.shape[1], trajectory.tokens.shape[1] - 1
    return trajectory.routing.read(width, num_read)


def replaced(policy: TokenPolicy, routing: RoutingMode) -> TokenPolicy:
    """Returns the same model with another routing."""
    return TokenPolicy(
        policy.model,
        policy.tokenizer,
        decoding=replace(policy.decoding, routing=routing),
        uses_chat_template=False,
    )


def largest_difference(policy: TokenPolicy, trajectory: TokenTrajectory, logp: Tensor) -> float:
    with torch.no_grad():
        return float((policy.log_prob(trajectory) - logp).abs().max())


def change_weights(policy: TokenPolicy) -> None:
    for parameter in policy.model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=seeded(7))


def test_what_was_recorded_in_sampling_is_what_the_model_chooses_on_one_sequence():
    policy = tiny_moe(routing="replay_sampled")
    trajectory, _ = sampled(policy)
    experts = experts_of(trajectory)
    for row, group in enumerate(trajectory.group.tolist()):
        prompt = trajectory.prompt[group][trajectory.prompt_mask[group]]
        tokens = trajectory.tokens[row][trajectory.mask[row]][:-1]  # the last is never read
        output = policy.model(torch.cat([prompt, tokens])[None], output_router_logits=True)
        expected = torch.stack([each.topk(2).indices for each in output.router_logits], dim=1)
        recorded_here = experts[row][was_read(trajectory)[row]]
        assert torch.equal(recorded_here.sort().values.long(), expected.sort().values)


def test_routing_follows_rollouts_that_end_at_different_steps():
    """An ended rollout's row is taken by another one, whose routing must stay its own."""
    policy = tiny_moe(routing="replay_sampled")
    policy.end_tokens = torch.arange(0, 259, 4)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=[8, 8, 8], generator=seeded())
    lengths = trajectory.mask.sum(dim=1)
    assert len(lengths.unique()) > 3
    assert (lengths.sort().values != lengths).any()
    chosen = experts_when_scored(replaced(policy, "live"), trajectory)
    read = was_read(trajectory)
    assert torch.equal(chosen[read], experts_of(trajectory)[read].to(chosen.dtype))
    assert largest_difference(policy, trajectory, logp) < 1e-4


@pytest.mark.parametrize(
    ("spread", "dtype", "factor"),
    [(1e-7, torch.float32, 1e4), (2e-2, torch.bfloat16, 10)],
    ids=["near ties", "bfloat16 sampler"],
)
def test_replay_removes_the_difference_between_sampler_and_trainer(
    spread: float, dtype: torch.dtype, factor: float
):
    """Rounding is enough to flip a near tie; what remains is the rounding itself."""
    sampler = copied(with_ties(tiny_moe(), spread=spread), routing="replay_sampled", dtype=dtype)
    replaying = copied(sampler, routing="replay_sampled", dtype=torch.float32)
    live = copied(sampler, routing="live", dtype=torch.float32)
    round_otherwise(sampler)
    trajectory, logp = sampled(sampler)
    read, given = was_read(trajectory), experts_of(trajectory)
    assert torch.equal(experts_when_scored(replaying, trajectory)[read], given[read])
    assert (experts_when_scored(live, trajectory)[read] != given[read]).any()
    before = largest_difference(live, trajectory, logp)
    assert before > 0.5
    assert largest_difference(replaying, trajectory, logp) < before / factor


def test_proximal_routing_is_that_of_the_first_scoring_and_equals_the_sampled_one_here():
    """R2 equals R3 where both engines choose alike; it is what scoring before the updates chose."""
    sampler = tiny_moe(routing="replay_sampled")
    trajectory, _ = sampled(sampler)
    trainer = tiny_moe(routing="replay_proximal")
    opened = trainer.replayed(replace(trajectory, routing=None))
    before = compute_log_probs(trainer, opened, trajectory.mask.float(), 64).logp
    read = was_read(trajectory)
    assert torch.equal(experts_of(opened)[read], experts_of(trajectory)[read])
    for policy in (trainer, sampler):
        change_weights(policy)
    with torch.no_grad():
        after = trainer.log_prob(opened)
        assert torch.equal(after, sampler.log_prob(trajectory))
        # Unlike the first scoring, this one did not record.
        assert torch.equal(experts_when_scored(trainer, opened)[read], experts_of(opened)[read])
    assert not torch.allclose(after[trajectory.mask], before[trajectory.mask])


def test_replay_pins_the_choice_when_the_weights_change_and_live_does_not():
    policy = tiny_moe(routing="replay_sampled")
    trajectory, _ = sampled(policy)
    change_weights(policy)
    live = copied(policy, routing="live", dtype=torch.float32)
    read, given = was_read(trajectory), experts_of(trajectory)
    assert torch.equal(experts_when_scored(policy, trajectory)[read], given[read])
    assert (experts_when_scored(live, trajectory)[read] != given[read]).any()


def test_a_live_policy_such_as_the_reference_ignores_recorded_routing():
    sampler, reference = tiny_moe(routing="replay_sampled"), tiny_moe(seed=5)
    trajectory, _ = sampled(sampler)
    with torch.no_grad():
        expected = reference.log_prob(replace(trajectory, routing=None))
        assert torch.equal(reference.log_prob(trajectory), expected)


@pytest.mark.parametrize("routing", REPLAYS)
def test_where_the_choice_agrees_gradients_are_those_of_live_routing(routing: RoutingMode):
    """To the last bit, the routers' included: the scores of the chosen experts are live."""
    trajectory, _ = sampled(tiny_moe(routing="replay_sampled"))
    gradients = []
    for mode in ("live", routing):
        policy = tiny_moe(routing=mode)
        scored = policy.replayed(trajectory)
        compute_log_probs(policy, scored, trajectory.mask.float(), 10_000)
        policy.log_prob(scored).sum().backward()
        gradients.append([each.grad for each in policy.model.parameters()])
        assert all(router.weight.grad.abs().max() > 1e-3 for router in find_routers(policy.model))
    assert all(torch.equal(live, again) for live, again in zip(*gradients))


def test_the_gradient_of_a_replayed_router_is_that_of_finite_differences():
    """After the weights moved, so that live routing would choose other experts."""
    policy = tiny_moe(routing="replay_sampled")
    trajectory, _ = sampled(policy)
    change_weights(policy)
    policy.model.double().set_experts_implementation("eager")  # the grouped product has no double
    router = find_routers(policy.model)[0]
    policy.log_prob(trajectory).sum().backward()
    direction = torch.randn(router.weight.shape, generator=seeded(1), dtype=torch.float64)
    sums = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            router.weight += step * direction
            sums.append(float(policy.log_prob(trajectory).double().sum()))
            router.weight -= step * direction
    slope = float((router.weight.grad * direction).sum())
    assert (sums[0] - sums[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_the_load_balancing_loss_of_the_model_class_never_enters():
    gradients = []
    for config in ({}, {"output_router_logits": True, "router_aux_loss_coef": 100.0}):
        policy = tiny_moe(**config)
        trajectory, _ = sampled(policy)
        policy.log_prob(trajectory).sum().backward()
        gradients.append([each.grad for each in policy.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))


def test_recorded_routing_survives_packing_joining_and_selecting():
    policy = tiny_moe(routing="replay_sampled")
    first, first_logp = sampled(policy)
    second, second_logp = policy.sample(["zz=", "q="], group_sizes=[2, 2], generator=seeded(1))
    packed = [first.pack(first_logp), second.pack(second_logp)]
    joined = {name: torch.cat([part[name] for part in packed]) for name in packed[0]}
    assert joined["experts"].shape == (int((joined["steps"] - 1).sum()), 2, 2)
    assert joined["experts"].dtype == joined["prompt_experts"].dtype == torch.uint8
    group = torch.cat([first.group + 50, second.group + 10])  # ids need not be sorted
    trajectory, _ = policy.unpack(joined, group)
    change_weights(policy)  # so that only replay gives what is expected
    with torch.no_grad():
        whole = policy.log_prob(trajectory)
        expected = [policy.log_prob(part)[part.mask] for part in (first, second)]
        torch.testing.assert_close(whole[trajectory.mask], torch.cat(expected))
        rows = torch.tensor([11, 0, 4])
        steps = int(trajectory.mask[rows].sum(dim=1).max())
        part = policy.log_prob(trajectory.select(rows, steps))
        torch.testing.assert_close(part, whole[rows, :steps])
        again = policy.log_prob(trajectory.select(rows, steps).select(torch.tensor([2]), steps))
        torch.testing.assert_close(again, whole[rows[2:], :steps])


def test_what_is_not_replayed_is_not_stored():
    for policy in (tiny_policy(), tiny_moe(), tiny_moe(routing="replay_proximal")):
        trajectory, logp = sampled(policy)
        assert trajectory.routing is None
        assert "experts" not in trajectory.pack(logp)


def test_expert_numbers_beyond_a_byte_are_stored_as_two():
    policy = tiny_moe(routing="replay_sampled", num_experts=256)
    trajectory, logp = sampled(policy)
    packed = trajectory.pack(logp)
    assert packed["experts"].dtype == torch.int16
    assert largest_difference(policy, policy.unpack(packed, trajectory.group)[0], logp) < 2e-5


def test_replay_of_a_dense_model_is_refused_by_the_parameters_name():
    dense = tiny_policy()
    with pytest.raises(ParameterError, match=r"policy.routing replay_sampled needs .* Llama"):
        replaced(dense, "replay_sampled")


def test_rollouts_without_routing_are_refused_by_the_parameters_name():
    dense, policy = tiny_policy(), tiny_moe(routing="replay_sampled")
    trajectory, logp = sampled(dense)
    packed = trajectory.pack(logp)
    with pytest.raises(ArtifactError, match=r"no routing for policy.routing replay_sampled"):
        policy.unpack(packed, trajectory.group)
    with pytest.raises(ValueError, match=r"policy.routing replay_sampled needs a trajectory"):
        policy.log_prob(trajectory)
    other = tiny_moe(routing="replay_sampled", num_hidden_layers=1)
    chosen, chosen_logp = sampled(other)
    with pytest.raises(ArtifactError, match=r"prompt_experts must be torch.uint8 of \(\d+, 2, 2\)"):
        policy.unpack(chosen.pack(chosen_logp), trajectory.group)


def test_routers_are_left_as_they_were_even_after_an_error():
    policy = tiny_moe(routing="replay_sampled")
    trajectory, _ = sampled(policy)
    broken = replace(trajectory, tokens=trajectory.tokens + 1000)
    with pytest.raises(IndexError):
        policy.log_prob(broken)
    assert all("forward" not in vars(router) for router in find_routers(policy.model))


@pytest.mark.parametrize(
    "model",
    [
        MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SMALL)),
        OlmoeForCausalLM(OlmoeConfig(num_experts=4, norm_topk_prob=True, **SMALL)),
        GptOssForCausalLM(GptOssConfig(num_local_experts=4, head_dim=4, **SMALL)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_other_families_route_alike(model: PreTrainedModel):
    """Whatever the router does with the scores of its choice, its own code does it again."""
    policy = TokenPolicy(
        model.eval(),
        tiny_moe().tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=4, routing="replay_sampled"),
        uses_chat_template=False,
    )
    trajectory, logp = sampled(policy)
    assert largest_difference(policy, trajectory, logp) < 2e-5
    read = was_read(trajectory)
    change_weights(policy)
    assert torch.equal(experts_when_scored(policy, trajectory)[read], experts_of(trajectory)[read])


@pytest.mark.parametrize("routing", REPLAYS)
def test_a_round_interrupted_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routing: RoutingMode
):
    monkeypatch.chdir(tmp_path)
    expected = train(routing, Scratch("train", "whole"), stop_after=None)
    with pytest.raises(KeyboardInterrupt):
        train(routing, Scratch("train", "stopped"), stop_after=1)
    resumed = train(routing, Scratch("train", "stopped"), stop_after=None)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    live = train("live", Scratch("train", "live"), stop_after=None)
    assert not torch.equal(live.lm_head.weight, expected.lm_head.weight)


def train(routing: RoutingMode, scratch: Scratch, *, stop_after: int | None) -> PreTrainedModel:
    """Returns the model after a round of two updates that change the routing."""
    policy = tiny_moe(routing=routing)
    trajectory, logp = sampled(policy)
    reward = (torch.arange(len(logp)) % 2).float()
    rollouts = rewarded(trajectory, logp, reward)

    def interrupt(done: int, total: int) -> None:
        if done == stop_after:
            raise KeyboardInterrupt

    run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rollouts,
            objective=rloo(),
            objective_state={},
            optimizer=make_optimizer(
                policy.model, TRAINING.model_copy(update={"learning_rate": 0.1})
            ),
            settings=settings_of(),
            first_update=0,
            generator=seeded(),
        ),
        scratch=scratch,
        progress=interrupt,
    )
    return policy.model
