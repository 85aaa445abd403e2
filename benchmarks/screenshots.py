"""Writes screenshots of a report, or of the team's Prefect and MLflow pages, to docs/.

python -m benchmarks.screenshots --report artifacts/report/index.html
python -m benchmarks.screenshots MODEL

The first one shows the top of the report on a desktop and a phone, light and dark. The second one
requires that `make team` runs in this workspace and that MODEL has been trained and promoted.
"""

import argparse
import io
import itertools
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.accessibility import SCHEMES
from benchmarks.browser import HOW_TO_GET, Page, find_chromium, open_browser
from flows.server import UI_LOCK, running_ui
from grpo.lineage.record import VIEW

DOCS = Path("docs")
SIZE = (1280, 860)
DEVICES = {"desktop": (1200, 800), "phone": (390, 844)}
COLORS = 96  # reduces the size to a third without visible differences
NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false')"


def main() -> int:
    """Writes the screenshots; returns 1 if there is no browser or no running team, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshots", description=__doc__)
    shown = parser.add_mutually_exclusive_group(required=True)
    shown.add_argument("model", metavar="MODEL", nargs="?")
    shown.add_argument("--report", type=Path, metavar="PAGE")
    model, report = (given := parser.parse_args()).model, given.report
    chromium = find_chromium()
    if chromium is None:
        print(HOW_TO_GET, file=sys.stderr)
        return 1
    if report is not None:
        with open_browser(chromium) as page:
            picture_on_devices(page, report, DOCS)
        return 0
    if running_ui(Path.cwd()) is None:
        print(f"{UI_LOCK}: a team must run in this workspace; run make team", file=sys.stderr)
        return 1
    addresses = json.loads(UI_LOCK.read_text())
    prefect, mlflow = addresses["prefect"], addresses["mlflow"]
    run, version = _newest_run(prefect), _champion(mlflow, model)
    with open_browser(chromium) as page:
        page.resize(*SIZE)
        visits = (
            visit_graph(page, prefect, run),
            visit_run(page, prefect, run),
            visit_version(page, mlflow, model, version),
        )
        for name, _ in itertools.chain(*visits):
            path = DOCS / f"page-{name}.png"
            save_small(page.picture(), path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def picture_on_devices(page: Page, report: Path, docs: Path) -> list[Path]:
    """Writes the top of a report on each of DEVICES, light and dark; returns the files."""
    written = []
    for device, size in DEVICES.items():
        for scheme in SCHEMES:
            page.resize(*size).prefer(scheme).open(report.absolute().as_uri())
            page.wait_until("document.querySelector('svg')?.clientHeight")
            written.append(docs / f"report-{device}-{scheme}.png")
            save_small(page.picture(), written[-1])
    page.prefer("light")
    return written


def visit_graph(page: Page, prefect: str, run: str) -> Iterator[tuple[str, str]]:
    """Yields name and visible text of the page that shows only the graph of a run."""
    page.open(f"{prefect}/runs/flow-run/{run}")
    for title in ("Toggle fullscreen", "Recenter graph"):
        page.wait_until(
            f"(e => e && (e.click(), true))(document.querySelector('[title^=\"{title}\"]'))"
        )
        page.picture()  # waits until the page is enlarged before it is recentered
    yield "graph", page.wait_for("Completed")


def visit_run(page: Page, prefect: str, run: str) -> Iterator[tuple[str, str]]:
    """Opens each page about a run and yields its name and visible text."""
    page.open(f"{prefect}/runs/flow-run/{run}")
    page.click("Task Runs")
    stages = page.wait_for("Completed", "train@")
    page.click("Artifacts")
    yield "run", stages + page.wait_for("progress", "stages", "report")
    page.click("report")
    yield "report", page.wait_for("number", "Lineage in MLflow")
    page.open(page.address_of("Report"))
    page.wait_until("document.querySelector('iframe')?.src")
    yield "mlflow-report", page.wait_for("index.html", "Artifacts")


def visit_version(page: Page, mlflow: str, model: str, version: str) -> Iterator[tuple[str, str]]:
    """Opens the pages of a model version and its promotion; yields name and visible text."""
    page.open(mlflow)
    page.click("Model training")  # MLflow remembers it
    page.run(NO_ASSISTANT)
    page.open(f"{mlflow}/#/models/{model}/versions/{version}{VIEW}")
    yield "version", (text := page.wait_for("policy_digest", "champion", f"{model}: promote"))
    page.click(re.findall(rf"{model}: promote \S+", text)[0])
    yield "promotion", page.wait_for("Datasets", "artifacts/policies/")


def save_small(picture: bytes, path: Path) -> None:
    """Writes a PNG with COLORS colors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def _newest_run(prefect: str) -> str:
    """Returns the id of the newest completed run of the pipeline."""
    wanted = {
        "sort": "START_TIME_DESC",
        "flows": {"name": {"any_": ["reproduce"]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    return str(_ask(f"{prefect}/api/flow_runs/filter", wanted)[0]["id"])


def _champion(mlflow: str, model: str) -> str:
    """Returns the version number of the champion."""
    where = f"{mlflow}/api/2.0/mlflow/registered-models/alias?name={model}&alias=champion"
    return str(_ask(where)["model_version"]["version"])


def _ask(address: str, content: Any = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
