"""Measures whether the base of benchmarks.grounding_methods improves an answer that it is shown.

python -m benchmarks.grounding_revisions 0 1 2 3 4   # runs missing stages, then writes the results
python -m benchmarks.grounding_revisions             # prints the table of the results

The base revises two kinds of answers to the same training prompts: its own, as in training, and
right answers made wrong as in its warm-up: one object is moved, or the count is off by one. Nothing
is trained. The bases are those of benchmarks.grounding_methods under .work/; remove that folder
after a change of code. Writes results/grounding_revisions.json.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.grounding_methods import RECIPE, read_spec, train_arms
from benchmarks.intervals import in_words, mean_interval
from benchmarks.seeds import record_seeds
from grpo.allocation.selection import Revision
from grpo.params.parameters import Parameters, read_params
from grpo.params.recipes import read_content
from grpo.rewards.box_distance import judge_distance
from grpo.runtime.artifacts.tables import (
    FIRST_ANSWER,
    FIRST_SCORE,
    PROMPTS,
    SCORE,
    read_table,
)
from grpo.runtime.markdown import markdown_table
from grpo.runtime.seeds import derive_seed
from grpo.sampling.revision import FirstAnswers, add_first_answers, ask_for_revisions
from grpo.sampling.rollouts import SampledBatch
from grpo.sampling.round_rollouts import executor_source
from grpo.sampling.scoring import tasks_by_prompt
from grpo.tasks.grounding import spoil
from grpo.types import Cost
from grpo.wiring.executors import open_executor
from grpo.wiring.policies import mode_name, stored_layout
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.shaping import build_shaping

ROUND, JUDGE = "revision-1", "box_distance"
PROMPTS_SHOWN, ROLLOUTS = 480, 8
OWN, NEAR = "its own", "a near miss"
ALL, FILLED, OUTLINED, COUNTS = "all", "filled shapes", "outlined shapes", "counts"
GROUPS = (ALL, FILLED, OUTLINED, COUNTS)
SETTINGS = {"prompts": PROMPTS_SHOWN, "rollouts": ROLLOUTS, "groups": [*GROUPS]}
MEASURES = ("shown", "revised", "better", "equal", "worse")
Found = dict[str, dict[str, dict[str, float]]]  # measures by kind of answer and group of prompts
Answers = tuple[SampledBatch, pd.DataFrame]  # sampled answers and their rewards
Draw = Callable[[pd.DataFrame, int, Revision | None], Answers]  # of prompts, with a seed


def main() -> None:
    """Runs the given seeds and prints the table of all finished seeds."""
    results = record_seeds(
        "grounding_revisions", SETTINGS, run_seed, lambda runs: {"summary": summarize(runs)}
    )
    print(table(results))


def run_seed(seed: int) -> Found:
    """Returns the errors of answers and of revisions by the base of a seed."""
    with chdir(train_arms(seed)):
        return measure(read_params(), seed)


def measure(params: Parameters, seed: int) -> Found:
    """Returns the measures of both kinds of answers, in a workspace with a base."""
    tasks = Path("artifacts/prompts/train.parquet")
    prompts = read_table(tasks, PROMPTS)
    prompts = prompts.sample(PROMPTS_SHOWN, random_state=seed).reset_index(drop=True)
    wanted = prompts.assign(rollouts=ROLLOUTS)
    near = near_misses(prompts, seed)
    with sampler(params, ROUND, tasks, Path("artifacts/policies/base")) as draw:
        own, own_rewards = draw(wanted, derive_seed(seed, OWN), revision())
        asked = ask_for_revisions(wanted, near, revision())
        other, other_rewards = draw(asked, derive_seed(seed, NEAR), None)
    families = read_content(RECIPE)["task"]["families"].items()
    group_by_family = {name: group_of(family) for name, family in families}
    groups = prompts.set_index("prompt_id")["family"].map(group_by_family)
    return {
        OWN: compare(own.table, own_rewards, groups),
        NEAR: compare(add_first_answers(other, near).table, other_rewards, groups),
    }


def group_of(family: dict[str, Any]) -> str:
    """Returns the group of a family of prompts; the warm-up never shows outlined shapes."""
    if family["question"] == "count":
        return COUNTS
    return OUTLINED if family["style"] == "outlined" else FILLED


def revision() -> Revision:
    """Returns the selection of the arm of that name, for all groups."""
    template = read_spec()["revised_pairs"]["template"]
    return Revision(share=1.0, template=template, judge=JUDGE)


@contextmanager
def sampler(params: Parameters, of_round: str, tasks: Path, policy: Path) -> Iterator[Draw]:
    """Yields a function that samples a policy and judges its answers, in the sampling of a round.

    Args:
      tasks: The table of prompts, with answers.
    """
    setup = SamplingSetup(
        params=params,
        prompts=tasks,
        purpose="round",
        round=of_round,
        base=Path("artifacts/policies/base"),
        policy=policy,
    )
    arm = params.find_round(of_round).arm
    with open_executor(make_sampling_work, setup) as executor:

        def draw(asked: pd.DataFrame, seed: int, revision: Revision | None) -> Answers:
            source = executor_source(
                executor,
                layout=stored_layout(params, setup.base),
                shaping=build_shaping(params),
                rollouts_per_batch=params.find_arm(arm).sampling.rollouts_per_batch,
                profile=None,
                progress=lambda done, total: None,
                draws=mode_name(0, 0),
                revision=revision,
            )
            scratch = Path(".work") / "answers" / policy.name / str(seed)
            return source.draw(asked, seed, scratch), source.judge(scratch)

        yield draw


def near_misses(prompts: pd.DataFrame, seed: int) -> FirstAnswers:
    """Returns right answers that were made wrong as in the warm-up."""
    shift = read_spec()["revised_pairs"]["shift"]
    chooser = random.Random(f"{seed} near")
    texts, scores = [], []
    for task in tasks_by_prompt(prompts).values():
        text = spoil(task.answer, int(str(task.entry["pixels"])), shift, chooser)
        texts.append(text)
        scores.append(judge_distance(text, task))
    table = pd.DataFrame({FIRST_ANSWER: texts, FIRST_SCORE: scores}, index=prompts["prompt_id"])
    return FirstAnswers(table, Cost())


def compare(
    revised: pd.DataFrame, rewards: pd.DataFrame, groups: pd.Series
) -> dict[str, dict[str, float]]:
    """Returns the mean errors of shown answers and of revisions, and how these differ."""
    both = revised.merge(rewards.drop(columns="prompt_id"), on="rollout_id", validate="1:1")
    both = both[both[FIRST_SCORE].notna()]
    before, after = both[FIRST_SCORE], both[SCORE + JUDGE]
    measured = pd.DataFrame(
        {
            "shown": 1 - before,
            "revised": 1 - after,
            "better": after > before,
            "equal": after == before,
            "worse": after < before,
        }
    ).astype(float)
    by_group = measured.groupby(both["prompt_id"].map(groups)).mean()
    by_group.loc[ALL] = measured.mean()
    return {str(group): by_group.loc[group].to_dict() for group in by_group.index}


def summarize(runs: dict[str, Found]) -> dict[str, Any]:
    """Returns means over seeds with 95 % t intervals."""
    return {
        kind: {
            group: {
                name: mean_interval([run[kind][group][name] for run in runs.values()])
                for name in MEASURES
            }
            for group in GROUPS
        }
        for kind in (OWN, NEAR)
    }


def table(results: dict[str, Any]) -> str:
    """Returns the Markdown table of docs/methods/group_revision.md."""
    rows = [
        [kind, group, *(in_words(measures[name], ".3f") for name in MEASURES)]
        for kind, found in results["summary"].items()
        for group, measures in found.items()
    ]
    titles = ["the answer shown", "prompts", "its error", "error of revisions"]
    return markdown_table([*titles, "better", "equal", "worse"], rows)


if __name__ == "__main__":
    main()
