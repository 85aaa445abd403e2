"""Runs the default pipeline and shows its end: summary, advice, and a picture of its report.

python -m benchmarks.first_run    # eight minutes; needs Chromium

Runs the committed revision from nothing in a fresh clone, with the seed of params.yaml. Writes
results/summary.txt, which docs/tutorial.md quotes, results/advice.txt, which docs/advice.md quotes,
docs/report.png, and results/first_run.json with the revision, the machine, the picture's digest and
how often the base solves evaluation prompts.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.browser import HOW_TO_GET, Page, find_chromium, open_browser
from benchmarks.demo import RESULTS, ROOT, fresh_clone, machine, output_of, revision_of, time_module
from benchmarks.screenshots import save_small
from grpo.params.parameters import BASE
from grpo.runtime.artifacts.files import sha256_of, write_json
from grpo.runtime.artifacts.tables import EVALUATION, read_table
from grpo.runtime.markdown import markdown_table

SUMMARY, ADVICE = RESULTS / "summary.txt", RESULTS / "advice.txt"
ABOUT = RESULTS / "first_run.json"
PICTURE = ROOT / "docs" / "report.png"
SIZE = (1200, 2010)  # the head of the report: sentences, table and curves


def main() -> int:
    """Runs the pipeline and writes the files; returns 1 if there is no browser, else 0."""
    chromium = find_chromium()
    if chromium is None:
        print(HOW_TO_GET, file=sys.stderr)
        return 1
    revision = revision_of("HEAD")
    with fresh_clone(revision) as workspace:
        time_module(workspace, "flows.reproduce")
        printed = output_of(workspace, "grpo", "summary")
        SUMMARY.write_text(re.sub(r"report: \S+?/artifacts", "report: .../artifacts", printed))
        ADVICE.write_text(output_of(workspace, "grpo", "advise"))
        solved = count_solved(workspace / "artifacts" / "evaluations" / f"{BASE}.parquet")
        with open_browser(chromium) as browser:
            picture_report(browser, workspace / "artifacts" / "report" / "index.html", PICTURE)
    about = {"command": "python -m benchmarks.first_run", "revision": revision}
    measured = {"picture_sha256": sha256_of(PICTURE), "prompts_by_solved_rollouts": solved}
    write_json(ABOUT, {**about, "machine": machine(), **measured})
    return 0


def count_solved(evaluation: Path) -> list[int]:
    """Returns how many prompts have 0, 1, 2 and so on solved rollouts."""
    table = read_table(evaluation, EVALUATION)
    counts = table["successes"].value_counts()
    return [int(counts.get(solved, 0)) for solved in range(int(table["rollouts"].max()) + 1)]


def solved_table(results: dict[str, Any]) -> str:
    """Returns the shares of prompts by their number of solved rollouts."""
    counts = results["prompts_by_solved_rollouts"]
    titles = [f"solved of {len(counts) - 1}", *map(str, range(len(counts)))]
    return markdown_table(titles, [["prompts", *(f"{each / sum(counts):.0%}" for each in counts)]])


def picture_report(browser: Page, report: Path, target: Path) -> None:
    """Writes a picture of the head of a report."""
    browser.resize(*SIZE).open(report.as_uri())
    browser.wait_until("document.querySelector('svg')?.clientHeight")
    save_small(browser.picture(), target)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.first_run", description=__doc__).parse_args()
    sys.exit(main())
