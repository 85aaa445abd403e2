"""Judges the rollouts of one round."""

from pathlib import Path

from grpo.artifacts.tables import PROMPTS, REWARDS, ROLLOUTS, read_table, write_table
from grpo.artifacts.usage import Usage
from grpo.build.tasks import build_reward
from grpo.params import read_params
from grpo.scoring import score_rollouts
from stages.entry import progress_bar, run


def main(usage: Usage, prompts: Path, rollouts: Path, out: Path) -> None:
    """Writes outcome, reward and status of every rollout."""
    rule = build_reward(read_params().reward)
    table = read_table(rollouts / "table.parquet", ROLLOUTS)
    with usage.part("scoring"), progress_bar() as progress:
        task = progress.add_task(f"score {out.stem}", total=len(table))
        rewards = score_rollouts(
            table,
            read_table(prompts, PROMPTS),
            rule,
            progress=lambda: progress.advance(task),
        )
    write_table(rewards, out, REWARDS)


if __name__ == "__main__":
    run(main, stage="score")
