"""The trial of links finds no fault with any link of the library."""

import pytest

from grpo.objective.trial import try_objective
from tests.objective.every_link import EVERY


@pytest.mark.parametrize("group_size", [2, 3, 16])
@pytest.mark.parametrize("name", EVERY)
def test_every_link_passes_the_trial(name: str, group_size: int):
    assert try_objective(EVERY[name], group_size) is None
