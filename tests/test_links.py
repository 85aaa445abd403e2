"""Settings of links must be numbers in their range, however a link is built."""

import math

import pytest

from grpo.objective import advantage, penalty
from grpo.objective.link import Link


def test_no_link_is_set_to_what_is_no_number():
    with pytest.raises(ValueError, match=r"^penalize_kl.beta must be a number, got nan$"):
        penalty.penalize_kl(beta=math.nan)
    with pytest.raises(ValueError, match=r"^a.b must be a number, got nan$"):
        Link("a", {"b": math.nan})


@pytest.mark.parametrize("link", [advantage.scale_by_group_std, advantage.scale_by_batch_std])
@pytest.mark.parametrize("settings", [{"ddof": 2}, {"ddof": -1}, {"epsilon": -1.0},
                                      {"epsilon": math.inf}, {"epsilon": math.nan}])  # fmt: skip
def test_a_deviation_is_refused_unless_its_settings_are_in_range(link, settings: dict):
    with pytest.raises(ValueError, match=r"needs ddof 0 or 1 and a finite epsilon >= 0"):
        link(**settings)
