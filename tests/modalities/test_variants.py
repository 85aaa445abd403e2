"""E2PO's variants: found near the caption and apart, drawn from, and never trained on."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.modalities.denoising.modality import Variants
from grpo.modalities.denoising.pipelines import encode_captions, pool_conditions, text_encoders
from grpo.modalities.denoising.variants import (
    Perturbation,
    blend,
    find_variants,
    perturbed,
    variant_weight,
)
from grpo.training.metrics import share_between_variants
from grpo.types import Rollouts
from tests.modalities.tiny_denoiser import seeded, tiny_denoiser
from tests.modalities.tiny_pipelines import tiny_sd3, tiny_wan

CAPTIONS = ["2A", "777"]
SIZES = [4, 5]


def variants_of(**settings: Any) -> Variants:
    chosen: dict[str, Any] = {
        "count": 3,
        "similarity": 0.9,
        "tolerance": 0.02,
        "diversity": 0.0,
        "init": 0.01,
        "updates": 200,
        "learning_rate": 0.01,
        "share": 0.5,
    }
    return Variants(**{**chosen, **settings})


def likeness(pipeline: Any, conditions: dict[str, Tensor], number: int) -> Tensor:
    """Returns the cosine of every variant's pooled embedding with its caption's."""
    with torch.no_grad():
        anchor = pool_conditions(pipeline, encode_captions(pipeline, CAPTIONS, 16))
    pooled = pool_conditions(pipeline, conditions)
    return torch.cosine_similarity(pooled, anchor.repeat_interleave(number, 0), dim=-1)


def test_variants_keep_their_distance_from_the_caption():
    pipeline = tiny_denoiser().pipeline
    before = {name: each.clone() for name, each in pipeline.text_encoder.state_dict().items()}
    settings = variants_of()
    found, flops = find_variants(pipeline, CAPTIONS, 1, settings, seeded())
    outside = (likeness(pipeline, found, 2) - settings.similarity).abs()
    assert float(outside.max()) <= settings.tolerance + 1e-3
    assert flops > 0
    for name, each in pipeline.text_encoder.state_dict().items():
        assert torch.equal(each, before[name]), name
    assert all(each.grad is None for each in pipeline.transformer.parameters())
    assert all(each.grad is None for each in pipeline.text_encoder.parameters())


def test_diversity_pushes_variants_apart():
    pipeline = tiny_denoiser().pipeline
    cosines = []
    for diversity in (0.0, 1.0):
        found, _ = find_variants(
            pipeline, CAPTIONS, 1, variants_of(diversity=diversity, updates=60), seeded()
        )
        first, second = pool_conditions(pipeline, found).unflatten(0, (-1, 2)).unbind(1)
        cosines.append(torch.cosine_similarity(first, second, dim=-1))
    assert (cosines[1] < cosines[0]).all()


def test_marks_and_padding_are_left_alone():
    pipeline = tiny_denoiser().pipeline
    tokenizer = pipeline.tokenizer
    ids = torch.tensor(tokenizer(CAPTIONS, padding="max_length", max_length=6)["input_ids"])
    embeddings = torch.randn(*ids.shape, 8, generator=seeded())
    changed = Perturbation(tokenizer.all_special_ids, 0.1, seeded())(
        torch.nn.Identity(), (ids,), embeddings
    )
    is_content = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    differs = (changed != embeddings).any(dim=-1)
    assert torch.equal(differs, is_content)
    assert is_content.sum(dim=1).tolist() == [2, 3]


def test_outside_of_the_block_nothing_is_perturbed():
    pipeline = tiny_denoiser().pipeline
    with torch.no_grad():
        plain = encode_captions(pipeline, CAPTIONS, 1)
        with perturbed(pipeline, 0.5, seeded()) as perturbations:
            other = encode_captions(pipeline, CAPTIONS, 1)
        again = encode_captions(pipeline, CAPTIONS, 1)
    assert len(perturbations) == 2
    for name, each in plain.items():
        assert not torch.equal(other[name], each)
        assert torch.equal(again[name], each)


def test_variants_act_at_the_noisy_end_only():
    assert [variant_weight(sigma, 0.5) for sigma in (1.0, 0.75, 0.5, 0.2)] == [1.0, 0.5, 0.0, 0.0]
    assert variant_weight(0.999, 1e-9) == 0.0


def test_the_first_of_a_prompts_conditions_is_the_prompt():
    conditions = {"a": torch.tensor([[1.0], [2.0]])}
    variants = {"a": torch.tensor([[10.0], [11.0], [20.0], [21.0]])}
    group, variant = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 2])
    assert blend(conditions, variants, group, variant, 1.0)["a"][:, 0].tolist() == [
        1,
        10,
        11,
        2,
        21,
    ]
    assert blend(conditions, variants, group, variant, 0.5)["a"][4, 0] == 11.5


def test_without_a_perturbation_variants_are_their_host_bit_by_bit():
    host = tiny_denoiser(density="matched")
    varied = tiny_denoiser(density="matched", variants=variants_of(init=0.0, updates=0))
    ours, _ = varied.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    expected, _ = host.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    assert torch.equal(ours.media, expected.media)
    assert ours.variant.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]


def test_updates_see_the_prompt_alone():
    """Log-probs of rollouts are those of a policy without variants, and so are their gradients."""
    varied = tiny_denoiser(density="matched", variants=variants_of(init=0.5, updates=5))
    trajectory, logp = varied.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    plain = tiny_denoiser(density="matched")
    assert torch.equal(plain.log_prob(trajectory).detach(), logp)
    host, _ = plain.sample(CAPTIONS, group_sizes=SIZES, generator=seeded())
    differs = (trajectory.media != host.media).flatten(1).any(dim=1)
    assert torch.equal(differs, trajectory.variant > 0)


def test_the_share_between_variants_is_that_of_the_sums_of_squares():
    rollouts = Rollouts(
        group=torch.tensor([0, 0, 0, 0, 3, 3]),
        reward=torch.tensor([0.0, 2.0, 4.0, 6.0, 1.0, 1.0]),
        outcome=torch.zeros(6),
        mask=torch.ones(6, 1, dtype=torch.bool),
        behavior_logp=torch.zeros(6, 1),
        variant=torch.tensor([0, 0, 1, 1, 0, 1]),
    )
    # Means 1 and 5 around 3: 4 x 4 of 9 + 1 + 1 + 9.
    assert share_between_variants(rollouts) == pytest.approx(16 / 20)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(tiny_sd3, {"text_encoder", "text_encoder_2"}), (tiny_wan, {"text_encoder"})],
)
def test_the_encoders_that_are_perturbed_are_those_that_the_pooled_embedding_reads(
    make: Any, expected: set[str]
):
    """Of Stable Diffusion 3 with T5 both CLIPs, of Wan its T5."""
    pipeline = make()
    encoders = {n: e for n, e in pipeline.components.items() if n.startswith("text_encoder")}
    pool_conditions(pipeline, encode_captions(pipeline, CAPTIONS, 16)).sum().backward()
    reached = {
        name
        for name, encoder in encoders.items()
        if any(each.grad is not None for each in encoder.parameters())
    }
    assert reached == expected
    assert [each for each, _ in text_encoders(pipeline, pooled=True)] == [
        encoders[n] for n in sorted(expected)
    ]


@pytest.mark.long
def test_variants_with_a_t5_keep_to_the_band_and_leave_it_alone():
    """The last rows of the condition are those of T5: no loss would hold them near the caption."""
    pipeline = tiny_sd3()
    settings = variants_of(updates=400)
    found, _ = find_variants(pipeline, CAPTIONS, 16, settings, seeded())
    outside = (likeness(pipeline, found, 2) - settings.similarity).abs()
    assert float(outside.max()) <= settings.tolerance + 1e-3
    with torch.no_grad():
        captions = encode_captions(pipeline, CAPTIONS, 16)
    states, plain = found["encoder_hidden_states"], captions["encoder_hidden_states"]
    plain = plain.repeat_interleave(2, 0)
    assert torch.equal(states[:, -16:], plain[:, -16:])
    assert not torch.allclose(states[:, :-16], plain[:, :-16])


def test_variants_do_not_depend_on_the_units_of_an_encoders_embeddings():
    """A residual stream 32 times as large says the same: its norms divide by its size."""
    pooled = []
    for scale in (1.0, 32.0):
        pipeline = tiny_sd3()
        with torch.no_grad():
            for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
                for module in encoder.modules():
                    if isinstance(module, torch.nn.LayerNorm):
                        module.eps = 0.0  # the only number with units of its own
                for name, each in encoder.named_parameters():
                    if re.search(r"embedding|out_proj|fc2", name):
                        each *= scale
        found, _ = find_variants(pipeline, CAPTIONS, 16, variants_of(updates=20), seeded())
        pooled.append(pool_conditions(pipeline, found))
    torch.testing.assert_close(pooled[0], pooled[1], rtol=1e-3, atol=1e-3)
