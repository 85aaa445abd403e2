"""Construction of the mapping from scores to rewards; it loads no judge."""

from grpo.params.parameters import Parameters
from grpo.sampling.shaping import Overlong, Shaping, Share


def build_shaping(params: Parameters) -> Shaping:
    """Returns the mapping from the judges' scores to outcome and reward."""
    reward, overlong = params.reward, params.reward.overlong_penalty
    return Shaping(
        shares=tuple(
            Share(judge=each.judge, weight=each.weight, normalize=each.normalize)
            for each in reward.judges
        ),
        threshold=reward.threshold,
        maximize=reward.maximize,
        unfinished_penalty=reward.unfinished_penalty,
        overlong=None if overlong is None else Overlong(**overlong.model_dump()),
    )
