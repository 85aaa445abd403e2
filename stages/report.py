"""Writes the report of a run: numbers, curves and the page."""

from pathlib import Path

from grpo.report.figures import write_curve
from grpo.report.numbers import compute_numbers, write_numbers
from grpo.report.page import write_page
from grpo.report.provenance import find_completed_run
from grpo.report.reading import read_run
from grpo.runtime.artifacts.marks import clear
from grpo.runtime.artifacts.usage import Usage
from stages.entry import run


def main(usage: Usage, artifacts: Path, out: Path) -> None:
    """Writes metrics.json, three CSV files, a curve and index.html into `out`."""
    ran = find_completed_run(is_stage=True)
    with usage.part("numbers"):
        finished = read_run(artifacts, ran.params)
        numbers = compute_numbers(finished)
        write_numbers(finished, numbers, out)
        write_curve(finished, numbers, out)
    with usage.part("page"):
        write_page(artifacts, ran.params, out, ran.banners)
        clear(ran.outdated_marks)


if __name__ == "__main__":
    run(main, stage="report")
