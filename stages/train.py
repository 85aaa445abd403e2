"""Updates the policy on the rollouts and rewards of one round."""

from pathlib import Path

from grpo.errors import DivergedError
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.divergence import curves_kept
from grpo.runtime.artifacts.files import WORK, Scratch
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.machine import prepare_machine
from grpo.runtime.ranks import all_agree, process_group, require_same, run_in_ranks, this_rank
from grpo.training.updates import TrainedRound
from grpo.wiring.rounds import (
    LoadedRound,
    RoundInputs,
    fewer_updates,
    load_round,
    save_round,
    train_loaded,
)
from stages.entry import run, scratch_of
from stages.progress import shown, warn


def main(
    usage: Usage,
    base: Path,
    start: Path,
    rollouts: Path,
    rewards: Path,
    policy_out: Path,
    training_out: Path,
) -> None:
    """Writes the policy and the training metrics of the round that the outputs name."""
    params, name = read_params(), policy_out.name
    ranks = params.find_arm(params.find_round(name).arm).training.ranks
    store = WORK / f"train@{name}.ranks"
    inputs = RoundInputs(base, start, rollouts, rewards)
    scratch = scratch_of(f"train@{name}", list(inputs), params)  # hashed once, not by every rank

    def work(usage: Usage) -> None:
        prepare_machine(params.machine)
        with process_group(ranks, params.machine.device, store=store):
            latest = scratch.latest()
            require_same("what ranks read", [str(scratch.directory), latest and latest[0]])
            with usage.part("load"):
                loaded = load_round(params, name, inputs)
            with usage.part("update"):
                trained = _train(loaded, scratch)
            save_round(loaded, trained, policy_out=policy_out, out=training_out)
            if this_rank() == 0:
                scratch.clear()

    run_in_ranks(ranks, work, usage, store=store)


def _train(loaded: LoadedRound, scratch: Scratch) -> TrainedRound:
    """Returns the trained round; the first rank shows progress and writes curves and warnings."""
    name, is_first = loaded.name, this_rank() == 0
    try:
        with (
            curves_kept(f"train@{name}", writes=is_first),
            shown(f"train {name}", is_seen=is_first) as progress,
        ):
            trained = train_loaded(loaded, scratch=scratch, progress=progress)
    except DivergedError:
        all_agree(True)  # a rank that exits ends all ranks: wait until the curves are written
        raise
    if is_first and (fewer := fewer_updates(loaded, trained)):
        warn(f"{name}: {fewer}")
    return trained


if __name__ == "__main__":
    run(main, stage="train")
