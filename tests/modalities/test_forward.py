"""Log-probs and gradients are those of a plain log-softmax over all logits, however computed."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from grpo.modalities.shared import logits as logits_module
from grpo.modalities.shared.decoding import (
    SHOWN_STEPS,
    _ReservingLayer,
    sampling_cache,
    score_bias,
)
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.logits import chosen_log_prob, draw
from grpo.modalities.shared.tokenizers import make_byte_tokenizer
from grpo.modalities.tokens.forward import has_full_attention
from grpo.modalities.tokens.policy import Decoding, TokenPolicy, TokenTrajectory
from tests.modalities.tiny import seeded, tiny_policy

PROMPTS = ["G12,18=", "S1+2=", "a longer prompt that is read once="]
SIZES = [5, 2, 7]


def plain_log_prob(
    policy: TokenPolicy, trajectory: TokenTrajectory, model: torch.nn.Module
) -> torch.Tensor:
    """Returns log-probs from one pass per rollout over all its tokens: no padding, no sharing."""
    logp = torch.zeros(trajectory.mask.shape)
    rows = []
    for row, group in enumerate(trajectory.group.tolist()):
        prompt = trajectory.prompt[group][trajectory.prompt_mask[group]]
        tokens = trajectory.tokens[row][trajectory.mask[row]]
        read = torch.cat([prompt, tokens])[None]
        scaled = model(read).logits[0] / policy.decoding.temperature
        chosen = scaled.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0]
        rows.append(torch.cat([chosen, logp[row, len(tokens) :]]))
    return torch.stack(rows)


def gradient(model: torch.nn.Module, logp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of sum(weight * logp) in all parameters, flat."""
    parameters = list(model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad((weight * logp).sum(), parameters)])


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kept_logits", [2**26, 0], ids=["kept", "recomputed"])
def test_log_probs_and_gradients_are_those_of_a_plain_log_softmax(
    monkeypatch: pytest.MonkeyPatch, seed: int, temperature: float, shares: bool, kept_logits: int
):
    """Ragged rollouts in float32, within 1e-6 of the same in float64."""
    monkeypatch.setattr(logits_module, "KEPT_LOGITS", kept_logits)
    monkeypatch.setattr(logits_module, "CHUNK_LOGITS", 700)  # two positions of 259 tokens
    policy = tiny_policy(temperature=temperature, max_steps=12, seed=seed)
    policy.forward.can_share = shares
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.5)  # sharper weights amplify the rounding of every implementation
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded(seed))
    rollouts, steps = trajectory.mask.shape
    lengths = torch.randint(1, steps + 1, (rollouts, 1), generator=seeded(seed))
    ragged = trajectory.mask & (torch.arange(steps) < lengths)
    trajectory = replace(trajectory, mask=ragged)
    weight = torch.randn(trajectory.mask.shape, generator=seeded(seed)) * trajectory.mask
    exact = copy.deepcopy(policy.model).double()
    logp, expected = policy.log_prob(trajectory), plain_log_prob(policy, trajectory, exact)
    assert (logp - expected).abs().max() <= 1e-6 * expected.abs().max()
    ours, plain = gradient(policy.model, logp, weight), gradient(exact, expected, weight)
    assert (ours - plain).norm() <= 1e-6 * plain.norm()


def test_steps_that_are_not_needed_do_not_reach_the_head():
    policy = tiny_policy()
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    needed = torch.rand(trajectory.mask.shape, generator=seeded()) < 0.5
    everything = policy.log_prob(trajectory)
    inputs: list[int] = []
    original = logits_module._softmax

    def counting(hidden: torch.Tensor, *rest: object):
        inputs.append(len(hidden))
        return original(hidden, *rest)

    logits_module._softmax = counting
    try:
        some = policy.log_prob(trajectory, needed)
    finally:
        logits_module._softmax = original
    computed = needed & trajectory.mask
    assert sum(inputs) == int(computed.sum())
    torch.testing.assert_close(some[computed], everything[computed])
    assert not some[~computed].any()


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kept_logits", [2**26, 0], ids=["kept", "recomputed"])
def test_flops_are_those_torch_counts(
    monkeypatch: pytest.MonkeyPatch, shares: bool, kept_logits: int
):
    monkeypatch.setattr(logits_module, "KEPT_LOGITS", kept_logits)
    policy = tiny_policy()
    policy.forward.can_share = shares
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    _ = policy.flops.training
    before = policy.cost.flops
    added = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
    counter = FlopCounterMode(display=False, custom_mapping={**missing_flop_formulas(), **added})
    with counter:
        policy.log_prob(trajectory).sum().backward()
    counted = counter.get_total_flops()
    assert policy.cost.flops - before == counted


def test_a_head_that_does_more_than_a_product_goes_through_the_model():
    """Gemma 2 caps its logits softly and attends in windows: neither may be lost."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        final_logit_softcapping=0.5,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    policy = TokenPolicy(
        Gemma2ForCausalLM(config).eval(),
        tokenizer,
        decoding=Decoding(temperature=1.0, max_steps=6),
        uses_chat_template=False,
    )
    assert policy.forward._head is None
    assert not has_full_attention(config)
    trajectory, sampled = policy.sample(["G12,18="], group_sizes=[6], generator=seeded())
    logp = policy.log_prob(trajectory)
    torch.testing.assert_close(
        logp, plain_log_prob(policy, trajectory, policy.model), atol=2e-6, rtol=1e-5
    )
    torch.testing.assert_close(logp.detach(), sampled, atol=2e-5, rtol=1e-5)


def test_one_rollout_per_prompt_is_read_in_one_pass():
    policy = tiny_policy()
    trajectory, _ = policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded())
    _ = policy.flops.training  # measured once, on passes of its own
    passes: list[int] = []
    body = policy.model.get_decoder()
    body.register_forward_hook(lambda module, inputs, given: passes.append(1))
    policy.log_prob(trajectory)
    assert len(passes) == 1
    several = replace(trajectory, group=torch.zeros(3, dtype=torch.long))
    policy.log_prob(several)
    assert len(passes) == 3


@pytest.mark.parametrize("new", [1, 2])
def test_an_attention_bias_is_on_the_device_of_its_mask(new: int):
    mask = torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert score_bias(mask, new, torch.float32).device == mask.device


@pytest.mark.parametrize("is_by_layer", [False, True])  # as another cache selects rows
@pytest.mark.parametrize("shows_reserved", [False, True])
def test_a_reserving_cache_holds_what_a_concatenating_one_holds(
    shows_reserved: bool, is_by_layer: bool
):
    config = tiny_policy().model.config
    reserved = SHOWN_STEPS if shows_reserved else 3
    ours = sampling_cache(config, max_steps=reserved, shows_reserved=shows_reserved)
    theirs = DynamicCache(config=config)
    assert all(isinstance(layer, _ReservingLayer) for layer in ours.layers)
    generator, rows = seeded(), 2
    for selected in (
        None, [0, 0, 1, 1, 1], None, None, None, None, None, [0, 4, 2, 3], None, [0, 2, 3], None,
        [0, 2], [1], None, *[None] * SHOWN_STEPS,
    ):  # fmt: skip
        if selected is not None:
            for chooser in (*(ours.layers if is_by_layer else [ours]), theirs):
                chooser.reorder_cache(torch.tensor(selected))
            rows = len(selected)
        new = torch.randn(2, 2, rows, 2, 1, 4, generator=generator)
        for index in range(2):
            got = ours.update(new[index, 0], new[index, 1], index)
            expected = theirs.update(new[index, 0], new[index, 1], index)
            length = theirs.get_seq_length()
            for left, right in zip(got, expected):
                assert torch.equal(left[:, :, :length], right)
                assert not left[:, :, length:].any()
                is_first = length == 1
                blocks = -(-(length - 1) // SHOWN_STEPS)
                shown = 1 + blocks * SHOWN_STEPS if shows_reserved and not is_first else length
                assert left.shape[2] == shown
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_what_a_cache_has_reserved_is_hidden_from_attention():
    """Over several blocks, log-probs are those of a pass without a cache."""
    policy = tiny_policy(max_steps=3 * SHOWN_STEPS, max_position_embeddings=128)
    trajectory, logp = policy.sample(PROMPTS, group_sizes=[5, 1, 3], generator=seeded())
    assert policy.forward.make_cache(SHOWN_STEPS).layers[0]._shows_reserved
    assert int(trajectory.mask.sum(dim=1).max()) > 2 * SHOWN_STEPS
    scored = policy.log_prob(trajectory)
    torch.testing.assert_close(scored[trajectory.mask], logp[trajectory.mask], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [5, 128, 259, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_draw_inverts_the_cumulative_distribution(vocabulary: int, temperature: float):
    logits = 3 * torch.randn(400, vocabulary, generator=seeded())
    uniform = torch.rand(400, dtype=torch.float64, generator=seeded(1))
    uniform[0] = 0.0
    chosen, logp = draw(logits, uniform, temperature)
    expected = (logits.double() / temperature).log_softmax(dim=1)
    cumulative = expected.exp().cumsum(dim=1)
    inverted = torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0]
    # Float32 probabilities move a boundary by 1e-7: a number there may fall on its other side.
    distance = (cumulative - uniform[:, None]).abs().amin(dim=1)
    assert ((chosen == inverted) | (distance < 1e-6)).all()
    assert (chosen == inverted).float().mean() > 0.99
    torch.testing.assert_close(
        logp.double(), expected.gather(1, chosen[:, None])[:, 0], atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("vocabulary", [300, 3000])  # summed at once, and by blocks
def test_a_token_without_mass_is_never_drawn(vocabulary: int):
    logits = torch.full((3, vocabulary), -torch.inf)
    logits[:, [7, 290]] = 0.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    chosen, logp = draw(logits, uniform, 1.0)
    assert chosen.tolist() == [7, 290, 290]
    torch.testing.assert_close(logp, torch.full((3,), 0.5).log())


def test_the_chosen_log_prob_has_the_gradient_of_finite_differences():
    head = torch.nn.Linear(3, 5).double()
    hidden = torch.randn(4, 3, dtype=torch.float64, generator=seeded(), requires_grad=True)
    chosen = torch.tensor([0, 4, 2, 2])
    logp = chosen_log_prob(hidden, head, chosen, 0.7)
    expected = (head(hidden) / 0.7).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
    inputs = [hidden, head.weight, head.bias]
    ours = torch.autograd.grad((weight * logp).sum(), inputs)
    plain = torch.autograd.grad((weight * expected).sum(), inputs)
    for left, right in zip(ours, plain):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-6)
