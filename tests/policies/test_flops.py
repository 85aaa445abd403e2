"""The FLOPs formula reproduces torch's own counter on shapes it was not fitted to."""

import pytest

from grpo.policies.flops import count_flops
from tests.policies.tiny import tiny_policy


@pytest.mark.parametrize(("query", "logits"), [(1, 1), (7, 3), (12, 12), (33, 1)])
@pytest.mark.parametrize("backward", [False, True])
def test_the_formula_equals_torchs_counter(query: int, logits: int, backward: bool):
    policy = tiny_policy()
    formula = policy.flops.training if backward else policy.flops.forward
    counted = count_flops(policy.model, query, logits, backward=backward)
    assert formula(rows=1, query=query, context=query, logits=logits) == counted


def test_the_linear_part_is_two_flops_per_weight_and_token():
    policy = tiny_policy()
    # attention: 16x16 query and output, 16x8 key and value; mlp: 3 of 16x32; two layers
    weights = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
    assert policy.flops.forward.body == 2 * weights
    assert policy.flops.forward.head == 2 * 16 * len(policy.tokenizer)
