"""Setup of a judging worker."""

from pathlib import Path

from grpo.runtime.artifacts.tables import PROMPTS, read_table
from grpo.runtime.executors.base import Work
from grpo.sampling.scoring import judging_skill
from grpo.schema import DATA
from grpo.wiring.executors import Setup, receive
from grpo.wiring.rewards import build_judges


class JudgingSetup(Setup):
    """The setup of a worker that judges."""

    prompts: Path  # schema PROMPTS


def make_judging_work(line: str) -> Work:
    """Returns the skills of a judging worker.

    Raises:
      ArtifactError: If the prompts are invalid, or the code differs from the stage's.
      MissingExtraError: If the judge's package is not installed.
      ParameterError: If the judge's model cannot be loaded.
    """
    setup = receive(JudgingSetup, line)
    judges = build_judges(setup.params, DATA, "reward")
    return Work({"judge": judging_skill(judges, read_table(setup.prompts, PROMPTS))})
