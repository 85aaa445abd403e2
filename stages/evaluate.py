"""Evaluates one policy on the held-out prompts: greedy, mean@k and pass@k."""

from dataclasses import asdict
from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.tables import EVALUATION, PROMPTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.policies import load_policy, prepare_machine
from grpo.build.tasks import build_reward
from grpo.evaluation import evaluate_prompts, summarize_evaluation
from grpo.params import read_params
from grpo.policies.tokens import Decoding
from grpo.scoring import score_rollouts
from grpo.seeds import derive_seed
from grpo.types import Cost
from stages.entry import run, sample, scratch_of

BATCH_ROLLOUTS = 512


def main(usage: Usage, base: Path, policy: Path, prompts: Path, table_out: Path, out: Path) -> None:
    """Writes results per prompt and their summary with intervals."""
    params = read_params()
    prepare_machine(params.machine)
    settings = params.evaluation
    rule = build_reward(params.reward)
    table = read_table(prompts, PROMPTS)
    scratch = scratch_of(f"evaluate@{out.stem}", [base, policy, prompts], params)
    results, cost = [], Cost()
    # The same draws for every policy: differences between policies are paired.
    draws = [("greedy", 0.0, 1), ("sampled", settings.temperature, settings.rollouts_per_prompt)]
    for kind, temperature, count in draws:
        decoding = Decoding(temperature=temperature, max_steps=params.policy.max_steps)
        with usage.part("load"):
            loaded = load_policy(params, base=base, directory=policy, decoding=decoding)
        with usage.part("sampling"):
            batch = sample(
                loaded,
                table.assign(rollouts=count),
                rollouts_per_batch=BATCH_ROLLOUTS,
                seed=derive_seed(params.seed, "evaluate", kind),
                scratch=scratch.within(kind),
            )
        with usage.part("scoring"):
            results.append(score_rollouts(batch.table, table, rule))
        cost += batch.cost
    evaluated = evaluate_prompts(table, *results)
    summary = summarize_evaluation(
        evaluated,
        confidence=settings.confidence,
        resamples=settings.bootstrap_resamples,
        seed=params.seed,
    )
    write_table(evaluated, table_out, EVALUATION)
    write_json(out, {**summary, "cost": asdict(cost)})
    scratch.clear()


if __name__ == "__main__":
    run(main, stage="evaluate")
