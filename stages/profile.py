"""Measures where the signal is: the base policy's outcome rate on every training prompt."""

from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.tables import PROFILE, PROMPTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.policies import load_policy, prepare_machine
from grpo.build.rewards import build_reward
from grpo.params import read_params
from grpo.policies.tokens import Decoding
from grpo.profiling import profile_prompts, summarize_profile
from grpo.sampling import sample_rollouts
from grpo.scoring import score_rollouts
from grpo.seeds import derive_seed
from stages.entry import run, scratch_of
from stages.progress import shown


def main(usage: Usage, policy: Path, prompts: Path, out: Path) -> None:
    """Writes prompts.parquet (one row per prompt) and summary.json."""
    params = read_params()
    prepare_machine(params.machine)
    rule = build_reward(params.reward)
    table = read_table(prompts, PROMPTS)
    scratch = scratch_of("profile", [policy, prompts], params)
    decoding = Decoding(
        temperature=params.evaluation.temperature, max_steps=params.policy.max_steps
    )
    with usage.part("load"):
        loaded = load_policy(params, base=policy, directory=policy, decoding=decoding)
    with usage.part("sampling"), shown("profile") as progress:
        batch = sample_rollouts(
            loaded,
            table.assign(rollouts=params.profile.rollouts_per_prompt),
            rollouts_per_batch=params.profile.rollouts_per_batch,
            seed=derive_seed(params.seed, "profile"),
            scratch=scratch.directory,
            progress=progress,
        )
    with usage.part("scoring"):
        rewards = score_rollouts(batch.table, table, rule)
    profile = profile_prompts(batch.table, rewards, table)
    write_table(profile, out / "prompts.parquet", PROFILE)
    write_json(out / "summary.json", summarize_profile(profile, batch.cost))
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="profile")
