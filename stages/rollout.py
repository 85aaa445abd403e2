"""Draws the rollouts of one round from the policy that the round starts from."""

from pathlib import Path

from grpo.artifacts.files import atomic_path
from grpo.artifacts.tables import PROMPTS, read_table
from grpo.artifacts.usage import Usage
from grpo.build.draws import draws_of_round
from grpo.build.machine import prepare_machine
from grpo.build.policies import load_sampler
from grpo.build.rollouts import build_source, judge_on_the_way, read_candidates
from grpo.build.selections import build_selection
from grpo.params import read_params
from grpo.policies.storage import read_state
from grpo.rollout import draw_round, write_round
from grpo.seeds import derive_seed
from stages.entry import run, scratch_of
from stages.progress import shown


def main(
    usage: Usage,
    base: Path,
    policy: Path,
    prompts: Path,
    curriculum: Path,
    profile: Path,
    out: Path,
) -> None:
    """Writes the rollouts of the round that `out` is named after; `profile`: the profile's."""
    params = read_params()
    prepare_machine(params.machine)
    name = out.name
    each = params.find_round(name)
    selection = build_selection(params.find_arm(each.arm).selection, each.arm)
    tasks = read_table(prompts, PROMPTS)
    candidates = read_candidates(params, name, selection, curriculum=curriculum, tasks=tasks)
    inputs = [base, policy, prompts, curriculum, *([profile] if selection.reuses_profile else [])]
    scratch = scratch_of(f"rollout@{name}", inputs, params)
    draws, judge = draws_of_round(params, name), judge_on_the_way(params, each.arm, tasks)
    with usage.part("load"):
        loaded = load_sampler(params, base=base, directory=policy, draws=draws, judge=judge)
    with usage.part("sampling"), shown(f"sample {name}") as progress:
        source = build_source(
            params, name, selection, policy=loaded, tasks=tasks, profile=profile, progress=progress
        )
        drawn = draw_round(
            selection,
            candidates,
            read_state(policy).selection_state,
            source=source,
            seed=derive_seed(params.seed, "rollout", name),
            scratch=scratch.directory,
        )
    usage.move("sampling", "simulation", loaded.waited_seconds)
    with atomic_path(out) as temporary:
        write_round(temporary, drawn, has_selection=bool(selection.links))
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="rollout")
