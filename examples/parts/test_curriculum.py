import numpy as np
import pandas as pd

from plugins.my_part import my_part


def test_prompts_outside_of_the_window_are_dropped():
    frame = pd.DataFrame({"prompt_id": ["a", "b", "c"], "outcome_rate": [0.0, 0.5, 1.0]})
    kept = my_part(low=0.1, high=0.9).apply(frame, np.random.default_rng(0))
    assert kept["prompt_id"].tolist() == ["b"]
