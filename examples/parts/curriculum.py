"""A curriculum step: say here which prompts it keeps."""

import numpy as np
import pandas as pd

from grpo.allocation.curriculum import CurriculumStep
from grpo.objective.link import Link


def my_part(low: float, high: float) -> CurriculumStep:
    """Keeps prompts that the base policy solves in a share of its rollouts from `low` to `high`."""

    def apply(frame: pd.DataFrame, chooser: np.random.Generator) -> pd.DataFrame:
        return frame[frame["outcome_rate"].between(low, high)]

    link = Link("my_part", {"low": low, "high": high}, "rate window")
    return CurriculumStep(link, apply, reads_profile=True)
