"""`make test-long` checks types and shapes at every call, of outer and of inner functions."""

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo.objective.advantage import is_uniform
from tests.shapes import MOST, check


def test_a_wrong_shape_is_refused(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("only make test-long checks shapes")
    with pytest.raises(TypeCheckError):
        is_uniform(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


def test_the_first_of_inner_functions_are_checked() -> None:
    def outer() -> object:
        def inner(value: int) -> int:
            return value

        return check(inner) is not inner

    assert [outer() for _ in range(MOST + 2)] == [True] * MOST + [False] * 2
