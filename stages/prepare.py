"""Writes the prompts of training and evaluation, and the solutions of the warm-up."""

from pathlib import Path

from grpo.artifacts.tables import PROMPTS, WARMUP, write_table
from grpo.artifacts.usage import Usage
from grpo.build.tasks import build_prompts
from grpo.params.parameters import read_params
from stages.entry import run


def main(usage: Usage, check: Path, data: Path, out: Path) -> None:
    """Writes {train,eval,warmup}.parquet; `check` only orders this stage after the rules."""
    tables = build_prompts(read_params(), data)
    write_table(tables.train, out / "train.parquet", PROMPTS)
    write_table(tables.eval, out / "eval.parquet", PROMPTS)
    write_table(tables.warmup, out / "warmup.parquet", WARMUP, allow_empty=True)


if __name__ == "__main__":
    run(main, stage="prepare")
