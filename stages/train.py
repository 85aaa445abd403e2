"""Updates the policy on a round's first rollouts, then samples, judges and updates further."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from grpo.errors import DivergedError
from grpo.params.parameters import Parameters, read_params
from grpo.runtime.artifacts.divergence import curves_kept
from grpo.runtime.artifacts.files import WORK, Scratch
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.curves import RoundCurve
from grpo.runtime.machine import prepare_machine
from grpo.runtime.rank_files import leads_directory
from grpo.runtime.ranks import all_agree, process_group, run_in_ranks, this_rank
from grpo.training.metrics import UpdateMetrics, update_rows
from grpo.wiring.iterations import RoundInputs, RoundState, Trainer, load_trainer
from grpo.wiring.rounds import StartLater, save_round, train_round
from stages.entry import run, scratch_of
from stages.progress import shown, warn

OpenLater = Callable[[Trainer], AbstractContextManager[StartLater | None]]


def main(
    usage: Usage,
    judge: Path,
    base: Path,
    start: Path,
    prompts: Path,
    curriculum: Path,
    rollouts: Path,
    rewards: Path,
    policy_out: Path,
    training_out: Path,
) -> None:
    """Writes the policy and the training metrics of the round that the outputs name.

    Args:
      judge: Manifest of the judge's files, written by the stage check.
      rollouts: Those of the first iteration, and `rewards` are theirs.
    """
    params, name = read_params(), policy_out.name
    ranks = params.find_arm(params.find_round(name).arm).training.ranks
    store = WORK / f"train@{name}.ranks"
    inputs = RoundInputs(judge, base, start, prompts, curriculum, rollouts, rewards)
    scratch = scratch_of(f"train@{name}", [*inputs], params)  # hashed once for all ranks

    def work(usage: Usage) -> None:
        prepare_machine(params.machine)
        with process_group(ranks, params.machine.device, store=store):
            with usage.part("load"):
                open_later = _prepare_later(params, name, inputs, scratch, usage)
                trainer = load_trainer(params, name, inputs)
            state = _train(trainer, inputs, scratch, usage, open_later)
            with usage.part("save"):
                save_round(trainer, state, scratch, policy_out=policy_out, out=training_out)
            if leads_directory():
                scratch.clear()

    run_in_ranks(ranks, work, usage, store=store)


def _train(
    trainer: Trainer, inputs: RoundInputs, scratch: Scratch, usage: Usage, open_later: OpenLater
) -> RoundState:
    """Trains the round; the first rank shows progress and writes curves and warnings."""
    name, is_first = trainer.name, this_rank() == 0
    try:
        with (
            curves_kept(f"train@{name}", writes=is_first),
            open_later(trainer) as start_later,
            shown(f"train {name}", is_seen=is_first) as progress,
        ):
            curve = _curve_of(trainer, scratch) if is_first else None
            state = train_round(
                trainer,
                inputs,
                start_later=start_later,
                scratch=scratch,
                usage=usage,
                progress=progress,
                note=lambda metrics: progress.note(_numbers(metrics)),
                follow=lambda state: curve.update(update_rows(state.metrics)) if curve else None,
            )
    except DivergedError:
        all_agree(True)  # a rank that exits ends all ranks: wait until the curves are written
        raise
    if curve and curve.is_behind:
        warn(f"{name}: MLflow does not answer; its curve is kept, and written with the lineage")
    if is_first and state.fewer_updates:
        warn(f"{name}: {state.fewer_updates}")
    if is_first and state.plateau:
        planned, plateau = trainer.training.iterations_per_round, state.plateau
        warn(
            f"{name}: stopped on a plateau after {state.iterations} of {planned} iterations: the "
            f"mean reward went from {plateau.before:.4g} to {plateau.after:.4g}"
        )
    return state


def _curve_of(trainer: Trainer, scratch: Scratch) -> RoundCurve:
    """Returns the curve that MLflow shows while the round is trained."""
    before = trainer.start.name if trainer.start.arm == trainer.arm else None
    key = scratch.directory.name
    return RoundCurve(arm=trainer.arm, name=trainer.name, key=key, before=before)


def _numbers(metrics: UpdateMetrics) -> dict[str, float]:
    """Returns the numbers of an update that are shown while a round trains."""
    kl = {"KL": metrics.kl_to_start} if metrics.kl_to_start else {}  # 0 of a first update
    return {
        "reward": metrics.reward_mean,
        "spread": metrics.reward_std_within,
        **kl,
        "grad norm": metrics.grad_norm,
    }


def _prepare_later(
    params: Parameters, name: str, inputs: RoundInputs, scratch: Scratch, usage: Usage
) -> OpenLater:
    """Returns what opens the samplers of the iterations after the first, if there are any.

    The judge is loaded here: its process is a fork, which would keep a copy of a loaded policy.
    """
    if params.find_arm(params.find_round(name).arm).training.iterations_per_round == 1:
        return lambda trainer: nullcontext()
    # Imported here: a round of one iteration needs neither samplers nor judges.
    from grpo.wiring.later_rollouts import build_later_judges, open_later_rollouts

    judges = build_later_judges(params, inputs)
    return lambda trainer: open_later_rollouts(
        trainer, inputs, judges=judges, scratch=scratch, usage=usage, warn=warn
    )


if __name__ == "__main__":
    run(main, stage="train")
