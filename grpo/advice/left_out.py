"""Signal that a round's allocation left out, measured with the policy that the round trained."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from grpo.errors import ArtifactError, ParameterError, located
from grpo.params.manifests import require_described
from grpo.params.parameters import Parameters
from grpo.report.words import SPACE, format_count, format_flops, format_percent
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import CURRICULUM, PROMPTS, REWARDS, is_judged, read_table
from grpo.runtime.executors.base import Executor
from grpo.runtime.markdown import markdown_table
from grpo.runtime.seeds import derive_seed
from grpo.sampling.drawing import sample_rollouts, stored_batches
from grpo.sampling.scoring import judge_stored, require_judged
from grpo.schema import DATA
from grpo.types import Cost
from grpo.wiring.executors import open_executor
from grpo.wiring.policies import mode_name
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.shaping import build_shaping

TRAINED = "the round trained on"
PLANNED = "in the arm's curriculum, not trained on"
LEFT_OUT = "not in the arm's curriculum"
MIN_ROLLOUTS = 2  # of a prompt: with one, p (1 - p) has no estimate
CONFIDENT = 1.96  # standard errors of a 95 % interval


def compare_left_out(
    artifacts: Path, params: Parameters, name: str, *, prompts: int, seed: int
) -> str:
    """Returns a table of the training prompts by whether a round trained on them.

    Draws rollouts of some prompts of each kind with the policy that the round has trained and the
    arm's sampling settings, as many of each prompt as the profile draws.

    Args:
      prompts: Number of prompts that are drawn of each kind.

    Raises:
      ParameterError: If there is no such round, or `prompts` is not positive.
      ArtifactError: If the round is not trained, or an artifact is broken.
      GrpoError: If no rollout was judged.
    """
    if prompts < 1:
        raise ParameterError(f"--prompts: must be >= 1, got {prompts}")
    arm = params.find_round(name).arm
    count = max(params.profile.rollouts_per_prompt, MIN_ROLLOUTS)
    tasks = artifacts / "prompts" / "train.parquet"
    kinds = _kinds(artifacts, name, arm, read_table(tasks, PROMPTS))
    seed = derive_seed(seed, "left out", name)
    chosen = [
        each.sample(min(prompts, len(each)), random_state=seed % 2**32)
        for _, each in kinds.groupby("kind", observed=True)
    ]
    asked = pd.concat(chosen, ignore_index=True).assign(rollouts=count)
    require_described(artifacts / "data" / "judge.json", params, DATA, "judge")
    setup = SamplingSetup(
        params=params,
        prompts=tasks,
        purpose="round",
        round=name,
        base=artifacts / "policies" / "base",
        policy=artifacts / "policies" / name,
    )
    with open_executor(make_sampling_work, setup) as executor:
        rewards, cost = _draw(executor, params, arm, asked, seed)
    with located(f"round {name}"):
        require_judged(rewards)
    rates = prompt_rates(rewards[is_judged(rewards)]).join(asked.set_index("prompt_id")["kind"])
    return _describe(name, count, kinds, rates, cost).replace(SPACE, " ")


def _kinds(artifacts: Path, name: str, arm: str, tasks: pd.DataFrame) -> pd.DataFrame:
    """Returns the training prompts with the column `kind`."""
    rewards = [read_table(each.rewards, REWARDS) for each in iterations_of(artifacts, name)]
    trained = pd.concat(rewards)["prompt_id"]
    planned = read_table(artifacts / "curricula" / f"{arm}.parquet", CURRICULUM)["prompt_id"]
    known = tasks["prompt_id"]
    if not trained.isin(known).all():
        raise ArtifactError(
            f"{artifacts}/rewards: prompts of round {name} are not among the training prompts; "
            "rerun the pipeline"
        )
    kind = np.select([known.isin(trained), known.isin(planned)], [TRAINED, PLANNED], LEFT_OUT)
    return tasks.assign(kind=pd.Categorical(kind, [TRAINED, PLANNED, LEFT_OUT]))


def _draw(
    executor: Executor, params: Parameters, arm: str, asked: pd.DataFrame, seed: int
) -> tuple[pd.DataFrame, Cost]:
    """Returns the rewards of the prompts' rollouts, and the cost of sampling them.

    Args:
      asked: The prompts with the column `rollouts`, the number for each.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        batch = sample_rollouts(
            executor,
            asked,
            rollouts_per_batch=params.find_arm(arm).sampling.rollouts_per_batch,
            seed=seed,
            scratch=scratch,
            draws=mode_name(0, 0),  # the first iteration's settings
        )
        stored, shaping = stored_batches(scratch), build_shaping(params)
        judged = judge_stored(executor, stored, shaping, scratch=scratch / "judged")
    return judged.rewards, batch.cost


def prompt_rates(rewards: pd.DataFrame) -> pd.DataFrame:
    """Returns, per prompt: the solved share, an unbiased p (1 - p), and whether outcomes differ."""
    groups = rewards.groupby("prompt_id")["outcome"].agg(["size", "sum"])
    groups = groups[groups["size"] >= MIN_ROLLOUTS]
    count, solved = groups["size"], groups["sum"]
    return pd.DataFrame(
        {
            "solved": solved / count,
            "signal": solved * (count - solved) / (count * (count - 1)),
            "mixed": ((solved > 0) & (solved < count)).astype(float),
        }
    )


def _describe(name: str, count: int, kinds: pd.DataFrame, rates: pd.DataFrame, cost: Cost) -> str:
    """Returns the table; `count` is the number of rollouts of each drawn prompt."""
    titles = ["training prompts", "all", "drawn", "solved", "p (1 - p)", "mixed groups"]
    rows = [
        [
            str(kind),
            format_count(int((kinds["kind"] == kind).sum())),
            format_count(len(each)),
            format_percent(float(each["solved"].mean())),
            _with_interval(each["signal"]),
            format_percent(float(each["mixed"].mean())),
        ]
        for kind, each in rates.groupby("kind", observed=True)
    ]
    return (
        f"{count} rollouts of each drawn prompt by the policy that {name} trained, with the "
        f"arm's sampling settings ({format_flops(float(cost.flops))}):\n\n"
        f"{markdown_table(titles, rows)}\n\n"
        "p (1 - p) is the variance of a prompt's outcomes, with a 95 % interval over prompts; "
        "a group whose outcomes\nare all equal gives no gradient. Where prompts that the round did "
        "not train on have as much of it as those\nthat it did, a rollout of them would give as "
        "much signal."
    )


def _with_interval(values: "pd.Series[float]") -> str:
    half = (
        CONFIDENT * float(np.std(values, ddof=1) / len(values) ** 0.5)
        if len(values) > 1
        else float("nan")
    )
    mean = float(values.mean())
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"
