"""Updates the policy on the rollouts and rewards of one round."""

from pathlib import Path

import torch

from grpo.artifacts.usage import Usage
from grpo.build.machine import prepare_machine
from grpo.build.rounds import load_round, objective_named, save_round
from grpo.params import read_params
from grpo.seeds import derive_seed
from grpo.training import train_round
from stages.entry import run, scratch_of
from stages.progress import shown


def main(
    usage: Usage,
    base: Path,
    start: Path,
    rollouts: Path,
    rewards: Path,
    policy_out: Path,
    training_out: Path,
) -> None:
    """Writes the policy and the training record of the round that the outs are named after."""
    params = read_params()
    prepare_machine(params.machine)
    name = policy_out.name
    scratch = scratch_of(f"train@{name}", [base, start, rollouts, rewards], params)
    with usage.part("load"):
        loaded = load_round(
            params, name, base=base, start=start, rollouts=rollouts, rewards=rewards
        )
    named = objective_named(params, name)
    with usage.part("update"), shown(f"train {name}") as progress, named:
        trained = train_round(
            loaded.policy,
            loaded.trajectory,
            loaded.rollouts,
            objective=loaded.objective,
            objective_state=loaded.objective_state,
            optimizer=loaded.optimizer,
            reference=loaded.reference,
            settings=loaded.settings,
            first_update=loaded.start_state.updates,
            generator=torch.Generator().manual_seed(derive_seed(params.seed, "train", name)),
            scratch=scratch,
            progress=progress,
        )
    save_round(params, name, loaded, trained, start=start, policy_out=policy_out, out=training_out)
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="train")
