"""Writes the prompts of training and evaluation, and the solutions of the warm-up."""

from pathlib import Path

from grpo.params.manifests import require_described
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.tables import PROMPTS, WARMUP, write_table
from grpo.runtime.artifacts.usage import Usage
from grpo.wiring.rewards import check_gold_answers
from grpo.wiring.tasks import build_prompts
from stages.entry import run
from stages.progress import warn


def main(usage: Usage, described: Path, data: Path, out: Path) -> None:
    """Writes {train,eval,warmup}.parquet.

    Args:
      described: Manifest of files in `data`, written by the stage check.
    """
    params = read_params()
    require_described(described, params, data, "task")
    tables = build_prompts(params, data)
    warn(check_gold_answers(params, tables.train, tables.eval))
    write_table(tables.train, out / "train.parquet", PROMPTS)
    write_table(tables.eval, out / "eval.parquet", PROMPTS)
    write_table(tables.warmup, out / "warmup.parquet", WARMUP, allow_empty=True)


if __name__ == "__main__":
    run(main, stage="prepare")
