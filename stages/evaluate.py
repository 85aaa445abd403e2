"""Evaluates one policy on the held-out prompts: greedy, mean@k and pass@k."""

from dataclasses import asdict, replace
from pathlib import Path

from grpo.artifacts.files import write_json
from grpo.artifacts.tables import EVALUATION, PROMPTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.policies import load_sampler, prepare_machine
from grpo.build.rewards import build_reward
from grpo.evaluation import evaluate_prompts, summarize_evaluation
from grpo.params import read_params
from grpo.policies.tokens import Decoding
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
    results, cost = [], Cost()
    # The same draws for every policy: differences between policies are paired.
    draws = {"greedy": (0.0, 1), "sampled": (settings.temperature, settings.rollouts_per_prompt)}
    greedy = Decoding(temperature=0.0, max_steps=params.policy.max_steps)
    loaded = load_sampler(params, base=base, directory=policy, decoding=greedy)
    for kind, (temperature, count) in draws.items():
        loaded.decoding = replace(greedy, temperature=temperature)
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
            results.append(score_rollouts(batch.table, table, rule))
    evaluated = evaluate_prompts(table, *results)
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
