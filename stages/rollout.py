"""Samples the rollouts of one round from the policy that the round starts from."""

from pathlib import Path

from grpo.artifacts.files import atomic_path
from grpo.artifacts.tables import CURRICULUM, PROMPTS, read_table
from grpo.artifacts.usage import Usage
from grpo.build.policies import load_policy, prepare_machine
from grpo.curriculum import add_prompts, select_phase
from grpo.errors import located
from grpo.params import PARAMS, read_params
from grpo.policies.tokens import Decoding
from grpo.sampling import sample_rollouts, write_rollouts
from grpo.seeds import derive_seed
from stages.entry import run, scratch_of
from stages.progress import shown


def main(
    usage: Usage, base: Path, policy: Path, prompts: Path, curriculum: Path, out: Path
) -> None:
    """Writes the rollouts of the round that `out` is named after."""
    params = read_params()
    prepare_machine(params.machine)
    each = params.find_round(out.name)
    settings = params.find_arm(each.arm).sampling
    plan, texts = read_table(curriculum, CURRICULUM), read_table(prompts, PROMPTS)
    with located(f"{PARAMS}: rounds.{out.name}.phase"):
        plan = select_phase(plan, each.phase)
    with located(curriculum):
        plan = add_prompts(plan, texts)
    scratch = scratch_of(f"rollout@{out.name}", [base, policy, prompts, curriculum], params)
    decoding = Decoding(temperature=settings.temperature, max_steps=params.policy.max_steps)
    with usage.part("load"):
        loaded = load_policy(params, base=base, directory=policy, decoding=decoding)
    with usage.part("sampling"), shown(f"sample {out.name}") as progress:
        batch = sample_rollouts(
            loaded,
            plan,
            rollouts_per_batch=settings.rollouts_per_batch,
            seed=derive_seed(params.seed, "rollout", out.name),
            scratch=scratch.directory,
            progress=progress,
        )
    with atomic_path(out) as temporary:
        write_rollouts(temporary, batch)
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="rollout")
