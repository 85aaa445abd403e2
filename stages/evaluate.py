"""Evaluates one policy on the held-out prompts: mean@k, pass@k, and greedy if there is that."""

from dataclasses import asdict
from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.tables import EVALUATION, PROMPTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.draws import draws_of_evaluation
from grpo.build.machine import prepare_machine
from grpo.build.policies import load_sampler
from grpo.build.rewards import build_reward
from grpo.evaluation import evaluate_prompts, summarize_evaluation
from grpo.params import read_params
from grpo.sampling import sample_rollouts
from grpo.scoring import score_rollouts
from grpo.seeds import derive_seed
from grpo.types import Cost
from stages.entry import run, scratch_of
from stages.progress import shown


def main(usage: Usage, base: Path, policy: Path, prompts: Path, table_out: Path, out: Path) -> None:
    """Writes results per prompt and their summary with intervals."""
    params = read_params()
    prepare_machine(params.machine)
    settings = params.evaluation
    rule = build_reward(params.reward)
    table = read_table(prompts, PROMPTS)
    scratch = scratch_of(f"evaluate@{out.stem}", [base, policy, prompts], params)
    results, cost = {}, Cost()
    draws = draws_of_evaluation(params)
    loaded = load_sampler(params, base=base, directory=policy, draws=draws["sampled"])
    for kind, each in draws.items():
        # The same draws for every policy: differences between policies are paired.
        loaded.decoding = each
        count = 1 if kind == "greedy" else settings.rollouts_per_prompt
        with usage.part("sampling"), shown(f"{kind} {out.stem}") as progress:
            batch = sample_rollouts(
                loaded,
                table.assign(rollouts=count),
                rollouts_per_batch=settings.rollouts_per_batch,
                seed=derive_seed(params.seed, "evaluate", kind),
                scratch=scratch.within(kind).directory,
                progress=progress,
            )
        cost += batch.cost
        with usage.part("scoring"):
            results[kind] = score_rollouts(batch.table, table, rule, media=batch.media)
    evaluated = evaluate_prompts(table, results["sampled"], results.get("greedy"))
    write_table(evaluated, table_out, EVALUATION)
    summary = summarize_evaluation(
        evaluated,
        confidence=settings.confidence,
        resamples=settings.bootstrap_resamples,
        seed=params.seed,
    )
    write_json(out, {**summary, "cost": asdict(cost)})
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="evaluate")
