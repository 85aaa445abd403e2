"""Samples the rollouts of a round's first iteration from the policy that the round starts from."""

from pathlib import Path

from grpo.modalities.shared.directories import files_for_sampling, read_state
from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import atomic_path, read_json
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.round_rollouts import write_round
from grpo.schema import DATA
from grpo.wiring.allocation import build_selection
from grpo.wiring.executors import open_executor
from grpo.wiring.prices import build_price
from grpo.wiring.rollouts import draw_iteration, first_history, read_candidates
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from stages.entry import run, scratch_of
from stages.progress import shown, warn


def main(
    usage: Usage,
    judge: Path,
    base: Path,
    policy: Path,
    prompts: Path,
    curriculum: Path,
    profile: Path,
    out: Path,
) -> None:
    """Writes the first rollouts of the round that `out` names.

    Args:
      judge: Manifest of the judge's files, written by the stage check.
      curriculum: Beside it lies a file of inputs that only some selections read.
      profile: Directory of the profile's rollouts.
    """
    params = read_params()
    require_described(judge, params, DATA, "judge")
    name = out.name
    each = params.find_round(name)
    selection = build_selection(params.find_arm(each.arm).selection, each.arm)
    candidates = read_candidates(params, name, curriculum=curriculum, prompts=prompts)
    history = read_state(policy, each.start).selection_state
    history = first_history(params, name, history, curriculum=curriculum)
    price = build_price(
        params,
        each.arm,
        base=base,
        candidates=candidates,
        training=lambda: read_json(curriculum.with_suffix(".json")),
    )
    more = [profile] if selection.reuses_profile else []
    inputs = [judge, base, *files_for_sampling(policy), prompts, curriculum, *more]
    scratch = scratch_of(f"rollout@{name}", inputs, params)
    setup = SamplingSetup(
        params=params,
        prompts=prompts,
        purpose="round",
        round=name,
        base=base,
        policy=policy,
        judges=selection.reads_outcomes,
    )
    with (
        open_executor(make_sampling_work, setup) as executor,
        usage.part("sampling"),
        shown(f"sample {name}") as progress,
    ):
        drawn = draw_iteration(
            setup,
            0,
            executor=executor,
            candidates=candidates,
            history=history,
            profile=profile,
            price=price,
            scratch=scratch.directory,
            progress=progress,
        )
    usage.move("sampling", executor.seconds())
    warn(drawn.unjudged)
    with atomic_path(out) as temporary:
        write_round(temporary, drawn, has_selection=bool(selection.links))
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="rollout")
