"""A token policy samples from the density it scores with, whatever the padding and batch."""

from dataclasses import replace

import pytest
import torch

from grpo.errors import ArtifactError
from grpo.modalities.modality import Lora
from grpo.modalities.shared.models import add_lora
from grpo.modalities.tokens.policy import Decoding
from tests.modalities.tiny import seeded, tiny_policy

PROMPTS = ["G12,18=", "S1+2=", "a longer prompt="]
SIZES = [3, 2, 4]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_recomputed_in_training_equal_those_of_sampling(temperature: float):
    """U25, U27: same temperature, cache or no cache, left padding or not."""
    policy = tiny_policy(temperature=temperature)
    trajectory, sampled = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    with torch.no_grad():
        scored = policy.log_prob(trajectory)
    torch.testing.assert_close(scored, sampled, atol=2e-5, rtol=1e-5)


def test_log_probs_equal_those_of_the_model_class_on_one_unpadded_sequence():
    policy = tiny_policy(temperature=0.8)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    logp = policy.log_prob(trajectory)
    for row in range(len(trajectory.group)):
        group = int(trajectory.group[row])
        prompt = trajectory.prompt[group][trajectory.prompt_mask[group]]
        tokens = trajectory.tokens[row][trajectory.mask[row]]
        logits = policy.model(torch.cat([prompt, tokens])[None]).logits[0].float() / 0.8
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logp[row][: len(tokens)], expected, atol=2e-5, rtol=1e-5)


def test_the_first_token_follows_the_models_distribution():
    """8000 draws, every token within 4.5 standard errors of its probability."""
    policy, count = tiny_policy(max_steps=1), 8000
    trajectory, _ = policy.sample(["G1,2="], group_sizes=[count], generator=seeded(3))
    tokens, mask = policy.encode(["G1,2="])
    with torch.no_grad():
        probability = policy.model(tokens, attention_mask=mask.long()).logits[0, -1].softmax(-1)
    frequency = torch.bincount(trajectory.tokens[:, 0], minlength=len(probability)) / count
    error = (probability * (1 - probability) / count).sqrt() + 1 / count
    assert ((frequency - probability).abs() < 4.5 * error).all()


def test_greedy_takes_the_most_likely_token_and_has_no_density():
    policy = tiny_policy(temperature=0.0)
    trajectory, _ = policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded())
    again, _ = policy.sample(PROMPTS, group_sizes=[1, 1, 1], generator=seeded(9))
    assert torch.equal(trajectory.tokens, again.tokens)
    with pytest.raises(ValueError, match="no density"):
        policy.log_prob(trajectory)


def test_a_rollout_ends_with_its_end_token_which_counts_as_a_step():
    policy = tiny_policy(max_steps=40)
    end = policy.tokenizer.eos_token_id
    trajectory, _ = policy.sample(["x="], group_sizes=[400], generator=seeded())
    finished = policy.is_finished(trajectory)
    assert 0 < int(finished.sum()) < 400
    for row, is_finished in enumerate(finished.tolist()):
        steps = trajectory.tokens[row][trajectory.mask[row]]
        assert (steps[-1] == end) == is_finished
        assert end not in steps[:-1]
        assert is_finished or len(steps) == 40


def test_pad_as_end_token_does_not_shorten_rollouts():
    """pad == eos is common: the mask counts positions, not token ids."""
    policy = tiny_policy(max_steps=5)
    policy.tokenizer.pad_token = policy.tokenizer.eos_token
    trajectory, sampled = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    torch.testing.assert_close(policy.log_prob(trajectory).detach(), sampled, atol=2e-5, rtol=1e-5)
    assert (trajectory.mask.sum(dim=1) >= 1).all()


def test_padding_and_masked_tokens_do_not_change_log_probs():
    policy = tiny_policy()
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    noisy = replace(
        trajectory,
        tokens=torch.where(trajectory.mask, trajectory.tokens, 77),
        prompt=torch.where(trajectory.prompt_mask, trajectory.prompt, 88),
    )
    assert torch.equal(policy.log_prob(noisy), policy.log_prob(trajectory))


def test_selected_rows_score_as_in_the_whole_batch():
    policy = tiny_policy()
    trajectory, _ = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    rows = torch.tensor([7, 0, 4])
    steps = int(trajectory.mask[rows].sum(dim=1).max())
    part = policy.log_prob(trajectory.select(rows, steps))
    torch.testing.assert_close(part, policy.log_prob(trajectory)[rows, :steps])


def test_packed_trajectories_unpack_and_concatenate():
    policy = tiny_policy()
    first, first_logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    second, second_logp = policy.sample(["zz=", "q="], group_sizes=[2, 2], generator=seeded(1))
    packed = [first.pack(first_logp), second.pack(second_logp)]
    joined = {name: torch.cat([part[name] for part in packed]) for name in packed[0]}
    group = torch.cat([first.group + 50, second.group + 10])  # ids need not be sorted
    trajectory, logp = policy.unpack(joined, group)
    expected = torch.cat([first_logp[first.mask], second_logp[second.mask]])
    assert torch.equal(logp[trajectory.mask], expected)
    torch.testing.assert_close(policy.log_prob(trajectory).detach(), logp, atol=2e-5, rtol=1e-5)


def test_tensors_that_do_not_fit_the_table_are_refused():
    policy = tiny_policy()
    trajectory, logp = policy.sample(PROMPTS, group_sizes=SIZES, generator=seeded())
    packed = trajectory.pack(logp)
    with pytest.raises(ArtifactError, match="its table 8 of 3"):
        policy.unpack(packed, trajectory.group[:-1])
    with pytest.raises(ArtifactError, match="must hold"):
        policy.unpack({"tokens": packed["tokens"]}, trajectory.group)
    with pytest.raises(ArtifactError, match="entries"):
        policy.unpack({**packed, "tokens": packed["tokens"][:-1]}, trajectory.group)


def test_decoding_skips_special_tokens():
    policy = tiny_policy()
    tokens = torch.tensor([policy.tokenizer("12#3", add_special_tokens=False)["input_ids"] + [2]])
    trajectory, _ = policy.sample(["x="], group_sizes=[1], generator=seeded())
    written = replace(trajectory, tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    assert policy.decode(written) == ["12#3"]


def test_sampled_steps_and_flops_are_counted():
    policy = tiny_policy(max_steps=1)
    policy.sample(["x="], group_sizes=[5], generator=seeded())
    # one prompt of 3 tokens is read once for the whole group
    flops = policy.flops.forward(rows=1, query=3, context=3, logits=1)
    assert (policy.cost.sampled_steps, policy.cost.flops) == (5, flops)
    policy.decoding = Decoding(temperature=1.0, max_steps=2)


def test_rollouts_are_read_again_with_an_adapter_on_the_embedding():
    policy = tiny_policy()
    lora = Lora(rank=2, alpha=4, dropout=0.0, target_modules=["q_proj", "embed_tokens"])
    add_lora(policy.model, lora, seed=0)
    trajectory, logp = policy.sample(["1"], group_sizes=[2], generator=seeded(0))
    again, _ = policy.unpack(trajectory.pack(logp), trajectory.group)
    assert torch.equal(again.tokens, trajectory.tokens)
