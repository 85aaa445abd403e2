"""Updates the policy on the rollouts and rewards of one round."""

from pathlib import Path

from grpo.errors import DivergedError
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.divergence import curves_kept
from grpo.runtime.artifacts.files import WORK, Scratch
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.machine import prepare_machine
from grpo.runtime.ranks import all_agree, process_group, require_same, run_in_ranks, this_rank
from grpo.wiring.rounds import fewer_updates, load_round, save_round, train_loaded
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
    """Writes the policy and the training record of the round that the outs are named after."""
    params = read_params()
    ranks = params.find_arm(params.find_round(policy_out.name).arm).training.ranks
    store = WORK / f"train@{policy_out.name}.ranks"
    inputs = [base, start, rollouts, rewards]
    scratch = scratch_of(f"train@{policy_out.name}", inputs, params)  # read once, not by each rank

    def work(usage: Usage) -> None:
        prepare_machine(params.machine)
        with process_group(ranks, params.machine.device, store=store):
            _train(params, usage, scratch, inputs, [policy_out, training_out])

    run_in_ranks(ranks, work, usage, store=store)


def _train(
    params: Parameters, usage: Usage, scratch: Scratch, inputs: list[Path], outs: list[Path]
) -> None:
    (base, start, rollouts, rewards), (policy_out, out) = inputs, outs
    name = policy_out.name
    latest = scratch.latest()
    require_same("what ranks read", [str(scratch.directory), latest and latest[0]])
    with usage.part("load"):
        loaded = load_round(
            params, name, base=base, start=start, rollouts=rollouts, rewards=rewards
        )
    is_first = this_rank() == 0
    try:
        with (
            curves_kept(f"train@{name}", writes=is_first),
            usage.part("update"),
            shown(f"train {name}", is_seen=is_first) as progress,
        ):
            trained = train_loaded(params, name, loaded, scratch=scratch, progress=progress)
    except DivergedError:
        all_agree(True)  # the first rank that ends ends all: not before the curves are written
        raise
    if is_first and (fewer := fewer_updates(loaded, trained)):
        warn(f"{name}: {fewer}")
    save_round(params, name, loaded, trained, policy_out=policy_out, out=out)
    if is_first:
        scratch.clear()


if __name__ == "__main__":
    run(main, stage="train")
