"""Evaluates one policy on the held-out prompts: mean@k, pass@k, and greedy if supported."""

from dataclasses import asdict
from pathlib import Path

from grpo.errors import located
from grpo.modalities.shared.directories import files_for_sampling, read_state
from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import (
    EVALUATION,
    EVALUATION_SAMPLES,
    PROMPTS,
    read_table,
    require_part,
    unscored,
    write_table,
)
from grpo.runtime.artifacts.usage import Usage
from grpo.sampling.evaluation import (
    evaluate_prompts,
    mean_rewards,
    means_by_kind,
    summarize_evaluation,
)
from grpo.sampling.evaluation_rollouts import (
    choose_samples,
    draw_evaluation,
    require_all_judged,
    score_evaluation,
    with_first_rollouts,
)
from grpo.sampling.scoring import score_corpora
from grpo.schema import DATA
from grpo.types import Cost
from grpo.wiring.executors import open_executor
from grpo.wiring.policies import draws_of_evaluation
from grpo.wiring.rewards import corpus_scorers
from grpo.wiring.sampling_workers import SamplingSetup, make_sampling_work
from grpo.wiring.shaping import build_shaping
from stages.entry import run, scratch_of
from stages.progress import shown, warn


def main(
    usage: Usage,
    judge: Path,
    base: Path,
    policy: Path,
    prompts: Path,
    results_out: Path,
    samples_out: Path,
    out: Path,
) -> None:
    """Writes results per prompt, a few rollouts for the report, and a summary with intervals.

    Args:
      judge: Manifest of the judge's files, written by the stage check.
    """
    params = read_params()
    require_described(judge, params, DATA, "judge")
    table = read_table(prompts, PROMPTS)
    require_part(table, "eval", prompts)
    read_state(policy, out.stem)  # raises if the policy is that of another round
    inputs = [judge, base, *files_for_sampling(policy), prompts]
    scratch = scratch_of(f"evaluate@{out.stem}", inputs, params)
    draws = draws_of_evaluation(params)
    setup = SamplingSetup(
        params=params, prompts=prompts, purpose="evaluation", base=base, policy=policy
    )
    with open_executor(make_sampling_work, setup) as executor:
        with usage.part("sampling"), shown(f"evaluate {out.stem}") as progress:
            batches = draw_evaluation(
                executor,
                table,
                draws=draws,
                rollouts_per_prompt=params.evaluation.rollouts_per_prompt,
                rollouts_per_batch=params.evaluation.rollouts_per_batch,
                seed=params.seed,
                scratch=scratch,
                progress=progress,
            )
        usage.move("sampling", executor.seconds())
        with usage.part("judging"), shown(f"score {out.stem}") as progress:
            shaping = build_shaping(params).without_shaping()
            judged = score_evaluation(executor, draws, shaping, scratch=scratch, progress=progress)
    with located(f"evaluate@{out.stem}"):
        for said in require_all_judged(judged):
            warn(said)
    greedy = judged["greedy"].rewards if "greedy" in judged else None
    evaluated = evaluate_prompts(table, judged["sampled"].rewards, greedy)
    summary = summarize_evaluation(
        evaluated,
        confidence=params.evaluation.confidence,
        resamples=params.evaluation.bootstrap_resamples,
        seed=params.seed,
    )
    for kind in judged.keys() - {"sampled", "greedy"}:
        summary[kind] = mean_rewards(judged[kind].rewards)
    summary["by_kind"] = means_by_kind(evaluated, table)
    write_table(with_first_rollouts(evaluated, batches, judged), results_out, EVALUATION)
    write_table(choose_samples(table, batches, judged), samples_out, EVALUATION_SAMPLES)
    cost = sum((each.cost for each in batches.values()), Cost())
    found = unscored(judged["sampled"].rewards)
    if scorers := corpus_scorers(params):
        summary["corpus"] = {
            kind: score_corpora(
                each.table, table, scorers, answer_pattern=params.reward.answer_pattern
            )
            for kind, each in batches.items()
        }
    write_json(out, {**summary, **found, "cost": asdict(cost)})
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="evaluate")
