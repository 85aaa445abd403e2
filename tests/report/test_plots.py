"""`dvc plots show` on a report: one picture per revision, a line per arm, nothing fetched."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from finished_run import ReadWith

from benchmarks.browser import Page
from grpo.report.figures import write_curve
from grpo.report.numbers import compute_numbers, write_numbers

OWN = yaml.safe_load((Path(__file__).parents[2] / "dvc.yaml").read_text())
OUT = Path("artifacts/report")
DVC = [sys.executable, "-m", "dvc"]
GIT = ["git", "-c", "user.name=tests", "-c", "user.email=tests@example.invalid"]
# Lines over the data: they are cut off at the axes' edge, and thicker than the axes' own.
LINES = "[...document.querySelectorAll('g[clip-path] > path, path[clip-path]')]"
DRAWN = f"{LINES}.filter(e => e.style.strokeWidth == '2.2').map(e => e.style.stroke)"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_plots_show_a_line_per_arm_once_and_fetch_nothing(
    read_with: ReadWith, browser: Page
) -> None:
    """Of two revisions there are two pictures, each under the name of its revision."""
    run("git", "init", "-q", "-b", "main")
    run(*DVC, "init", "-q")
    stage = {**OWN["stages"]["report"], "cmd": "true", "deps": [], "params": []}
    pipeline = {**OWN, "stages": {"report": stage}}
    Path("dvc.yaml").write_text(yaml.safe_dump(pipeline))
    for name, successes in {"one": [2, 2, 4, 4], "two": [1, 2, 4, 4]}.items():
        finished = read_with({"uniform-2": successes})
        numbers = compute_numbers(finished)
        write_numbers(finished, numbers, OUT)
        write_curve(finished, numbers, OUT)
        run(*DVC, "commit", "-q", "-f")
        run(*GIT, "add", "-A")
        run(*GIT, "commit", "-q", "-m", name)
        run("git", "branch", name)

    run(*DVC, "plots", "show", "-q")
    page = Path("dvc_plots/index.html")
    assert show(browser, page) == 1
    browser.open((OUT / "reward_by_cost.svg").absolute().as_uri())
    colors = browser.wait_until(f"document.readyState == 'complete' && {DRAWN}")
    assert len(colors) == len(set(colors)) == 2  # uniform and sgpo

    run(*DVC, "plots", "diff", "-q", "one", "two")
    assert show(browser, page) == 2
    text = browser.run("document.body.innerText")
    assert "one" in text
    assert "two" in text


def show(browser: Page, page: Path) -> int:
    """Opens a page; returns how many pictures it shows, all from this folder."""
    browser.open(page.absolute().as_uri())
    browser.wait_until("document.readyState == 'complete'")
    assert "://" not in page.read_text().replace("http://www.w3.org", "").replace("file://", "")
    fetched = browser.run("performance.getEntriesByType('resource').map(e => e.name)")
    assert all(each.startswith("file://") for each in fetched)
    assert browser.run("document.scripts.length") == 0
    shown = "[...document.images].filter(e => e.naturalWidth > 0)"
    assert browser.run(f"{shown}.length") == browser.run("document.images.length")
    return int(browser.run("document.images.length"))
