"""Samples and judges the profile's rollouts; imported only if something reads the profile."""

from pathlib import Path

import pandas as pd

from grpo.allocation.profiling import profile_prompts, summarize_profile
from grpo.errors import located
from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import Scratch, atomic_path, write_json
from grpo.runtime.artifacts.tables import PROFILE, PROMPTS, read_table, unscored, write_table
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.seeds import derive_seed
from grpo.sampling.drawing import sample_rollouts, stored_batches
from grpo.sampling.rollouts import SampledBatch, keep_judged, number_anew, write_batch
from grpo.sampling.scoring import judge_stored, require_judged
from grpo.schema import DATA
from grpo.wiring.executors import open_executor
from grpo.wiring.phase_profiles import profile_steps
from grpo.wiring.policies import stored_layout
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.shaping import build_shaping
from stages.entry import scratch_of
from stages.progress import shown, warn


def write_profile(usage: Usage, judge: Path, policy: Path, prompts: Path, out: Path) -> None:
    """Writes prompts.parquet, summary.json and the judged rollouts.

    Args:
      judge: Manifest of the judge's files, written by the stage check.
    """
    params = read_params()
    require_described(judge, params, DATA, "judge")
    table = read_table(prompts, PROMPTS)
    scratch = scratch_of("profile", [judge, policy, prompts], params)
    setup = SamplingSetup(
        params=params, prompts=prompts, purpose="profile", base=policy, policy=policy
    )
    batch, rewards = _draw_and_judge(usage, setup, table, scratch)
    with located("profile"):
        warn(require_judged(rewards))
    batch = keep_judged(stored_layout(params, policy), batch, rewards)
    with usage.part("gradients"):
        steps, cost = profile_steps(params, policy, batch, rewards)
    profile = profile_prompts(batch.table, rewards, table)
    with atomic_path(out / "rollouts") as temporary:
        write_batch(temporary, number_anew(batch))
    write_table(profile, out / "prompts.parquet", PROFILE)
    summary = summarize_profile(profile, batch.cost + cost, steps)
    write_json(out / "summary.json", {**summary, **unscored(rewards)})
    scratch.clear()


def _draw_and_judge(
    usage: Usage, setup: SamplingSetup, table: pd.DataFrame, scratch: Scratch
) -> tuple[SampledBatch, pd.DataFrame]:
    """Returns rollouts and rewards; the executor and its policy are released on return."""
    params, judged = setup.params, scratch.within("judged").directory
    with open_executor(make_sampling_work, setup) as executor:
        with usage.part("sampling"), shown("profile") as progress:
            batch = sample_rollouts(
                executor,
                table.assign(rollouts=params.profile.rollouts_per_prompt),
                rollouts_per_batch=params.profile.rollouts_per_batch,
                seed=derive_seed(params.seed, "profile"),
                scratch=scratch.directory,
                progress=progress,
            )
        usage.move("sampling", executor.seconds())
        stored = stored_batches(scratch.directory)
        shaping = build_shaping(params).without_shaping()  # the first judge decides outcomes
        with usage.part("judging"), shown("score profile") as progress:
            rewards = judge_stored(
                executor, stored, shaping, scratch=judged, progress=progress
            ).rewards
    return batch, rewards
