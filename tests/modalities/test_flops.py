"""The FLOPs formula reproduces torch's own counter on shapes it was not fitted to."""

import pytest

from grpo.modalities.shared.flops import count_flops
from tests.modalities.tiny import tiny_moe, tiny_policy


@pytest.mark.parametrize(("query", "logits"), [(1, 1), (7, 3), (12, 12), (33, 1)])
@pytest.mark.parametrize("backward", [False, True])
def test_the_formula_equals_torchs_counter(query: int, logits: int, backward: bool):
    policy = tiny_policy()
    formula = policy.flops.training if backward else policy.flops.forward
    counted = count_flops(policy.model, query, logits, backward=backward)
    assert formula(rows=1, query=query, context=query, logits=logits) == counted


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_flops_of_experts_do_not_depend_on_routing(experts: str, backward: bool):
    """Per token, each of k experts multiplies by its three matrices; the backward pass doubles it.

    torch's counter leaves out the grouped product that transformers uses by default.
    """
    policy = tiny_moe()
    policy.model.set_experts_implementation(experts)
    formula = policy.flops.training if backward else policy.flops.forward
    # attention: 16x16 query and output, 16x8 key and value; router 16x4; 2 experts of 3 of 16x8
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 16 * 4 + 2 * 3 * 16 * 8)
    assert formula.body == 2 * weights * (3 if backward else 1)
    counted = count_flops(policy.model, 33, 5, backward=backward)
    assert formula(rows=1, query=33, context=33, logits=5) == counted


def test_the_linear_part_is_two_flops_per_weight_and_token():
    policy = tiny_policy()
    # attention: 16x16 query and output, 16x8 key and value; mlp: 3 of 16x32; two layers
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    assert policy.flops.forward.body == 2 * weights
    assert policy.flops.forward.head == 2 * 16 * len(policy.tokenizer)
