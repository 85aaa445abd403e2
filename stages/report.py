"""Turns everything the run left behind into numbers, curves and the page."""

from pathlib import Path

from grpo.artifacts.usage import Usage
from grpo.params.parameters import read_params
from grpo.report.numbers import compute_numbers, write_numbers
from grpo.report.page import write_page
from grpo.report.reading import read_run
from stages.entry import run


def main(usage: Usage, artifacts: Path, out: Path) -> None:
    """Writes metrics.json, three CSV files and index.html into `out`."""
    params = read_params()
    with usage.part("numbers"):
        finished = read_run(artifacts, params)
        write_numbers(finished, compute_numbers(finished), out)
    with usage.part("page"):
        write_page(artifacts, params, out)


if __name__ == "__main__":
    run(main, stage="report")
