"""What judges a stage's rollouts, wherever that is done."""

from pathlib import Path

from grpo.artifacts.tables import PROMPTS, read_table
from grpo.build.engines import Setup, receive
from grpo.build.rewards import build_reward
from grpo.engines.base import Work
from grpo.params.parameters import DATA
from grpo.scoring import judging


class Judging(Setup):
    """What judging depends on beside the parameters."""

    prompts: Path  # schema PROMPTS


def make_judging(line: str) -> Work:
    """Returns the work of a stage that judges.

    Raises:
      ArtifactError: If the prompts are broken, or the code is not the stage's.
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If the judge's model cannot be loaded.
    """
    setup = receive(Judging, line)
    rule = build_reward(setup.params, DATA)
    return Work({"judge": judging(rule, read_table(setup.prompts, PROMPTS))})
