"""Measures where the signal is: the base policy's outcome rate on every training prompt."""

from pathlib import Path

from grpo.artifacts.files import atomic_path, write_json
from grpo.artifacts.tables import PROFILE, PROMPTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.draws import draws_of_profile
from grpo.build.machine import prepare_machine
from grpo.build.phase_profiles import profile_steps
from grpo.build.policies import load_sampler
from grpo.build.rewards import build_reward
from grpo.params import DATA, read_params
from grpo.profiling import profile_prompts, summarize_profile
from grpo.sampling import sample_rollouts, write_batch
from grpo.scoring import score_rollouts
from grpo.seeds import derive_seed
from stages.entry import run, scratch_of
from stages.progress import shown


def main(usage: Usage, policy: Path, prompts: Path, out: Path) -> None:
    """Writes prompts.parquet (one row per prompt), summary.json and the rollouts."""
    params = read_params()
    prepare_machine(params.machine)
    rule = build_reward(params, DATA)
    table = read_table(prompts, PROMPTS)
    scratch = scratch_of("profile", [policy, prompts], params)
    draws = draws_of_profile(params)
    with usage.part("load"):
        loaded = load_sampler(params, base=policy, directory=policy, draws=draws)
    with usage.part("sampling"), shown("profile") as progress:
        batch = sample_rollouts(
            loaded,
            table.assign(rollouts=params.profile.rollouts_per_prompt),
            rollouts_per_batch=params.profile.rollouts_per_batch,
            seed=derive_seed(params.seed, "profile"),
            scratch=scratch.directory,
            progress=progress,
        )
    usage.move("sampling", "simulation", loaded.waited_seconds)
    with usage.part("scoring"), shown("score profile") as progress:
        rewards = score_rollouts(batch.table, table, rule, media=batch.media, progress=progress)
    with usage.part("gradients"):
        steps, cost = profile_steps(params, loaded, batch, rewards)
    profile = profile_prompts(batch.table, rewards, table)
    with atomic_path(out / "rollouts") as temporary:
        write_batch(temporary, batch)
    write_table(profile, out / "prompts.parquet", PROFILE)
    write_json(out / "summary.json", summarize_profile(profile, batch.cost + cost, steps))
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="profile")
