"""Plans the curriculum of one arm: prompts, phases and group sizes."""

from pathlib import Path

import pandas as pd

from grpo.allocation.curriculum import curriculum_input, plan_curriculum
from grpo.errors import located
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import (
    CURRICULUM,
    PROFILED,
    PROMPTS,
    read_profile,
    read_table,
    write_table,
)
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.seeds import derive_seed
from grpo.schema import PARAMS
from grpo.wiring.allocation import (
    build_selection,
    counts_profile,
    curriculum_of,
    inputs_of_selection,
)
from stages.entry import run


def main(
    usage: Usage, prompts: Path, profile: Path, rollouts: Path, out: Path, inputs_out: Path
) -> None:
    """Writes the curriculum of the arm that `out` names, and the inputs of its selection."""
    params = read_params()
    arm = out.stem
    steps, selection = (
        curriculum_of(params, arm),
        build_selection(params.find_arm(arm).selection, arm),
    )
    drawn, table = read_profile(profile), read_table(prompts, PROMPTS)
    with located(profile):
        rates = curriculum_input(drawn, table, steps)
    with located(f"{PARAMS}: arms.{arm}.curriculum{_remark_on_unjudged(rates, table)}"):
        plan = plan_curriculum(
            rates,
            steps,
            seed=derive_seed(params.seed, "curriculum", arm),
            has_sizes=bool(selection.sizes),
        )
    if counts_profile(params, arm):
        plan = plan.join(drawn.set_index("prompt_id")["rollouts"].rename(PROFILED), on="prompt_id")
    write_table(plan, out, CURRICULUM)
    inputs = inputs_of_selection(params, arm, rollouts)
    if selection.seconds is not None:
        # Imported here: few arms need it, and it imports torch.
        from grpo.wiring.training_costs import training_costs

        # The rollout stage reads these instead of the objective, so that a changed link does not
        # sample the rollouts of other arms again.
        inputs |= training_costs(params, arm)
    write_json(inputs_out, inputs)


def _remark_on_unjudged(rates: pd.DataFrame, prompts: pd.DataFrame) -> str:
    """Returns a remark on the prompts that the profile leaves out, if there are some."""
    left = prompts[~prompts["prompt_id"].isin(rates["prompt_id"])]
    if not len(left):
        return ""
    first = left["prompt_id"].iloc[0]
    return f" (without {len(left)} of {len(prompts)} prompts, on which judges failed, e.g. {first})"


if __name__ == "__main__":
    run(main, stage="curriculum")
