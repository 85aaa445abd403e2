"""Judges the rollouts of one round."""

from pathlib import Path

from grpo.artifacts.tables import PROMPTS, REWARDS, ROLLOUTS, read_table, write_table
from grpo.artifacts.tensors import read_tensors
from grpo.artifacts.usage import Usage
from grpo.build.rewards import build_reward
from grpo.errors import located
from grpo.params import DATA, read_params
from grpo.scoring import score_rollouts
from stages.entry import run
from stages.progress import shown


def main(usage: Usage, prompts: Path, rollouts: Path, out: Path) -> None:
    """Writes outcome, reward and status of every rollout."""
    rule = build_reward(read_params(), DATA)
    path = rollouts / "table.parquet"
    table, tasks = read_table(path, ROLLOUTS), read_table(prompts, PROMPTS)
    media = None
    if rule.looks_at_media:
        media = read_tensors(rollouts / "tensors.safetensors").get("media")
    with usage.part("scoring"), shown(f"score {out.stem}") as progress, located(path):
        rewards = score_rollouts(table, tasks, rule, media=media, progress=progress)
    write_table(rewards, out, REWARDS)


if __name__ == "__main__":
    run(main, stage="score")
