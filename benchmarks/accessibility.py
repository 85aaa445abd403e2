"""Checks a report page with axe-core in a headless Chromium, in light and dark, wide and narrow.

python -m benchmarks.accessibility artifacts/report/index.html

npm fetches axe-core; the page itself loads nothing.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.browser import HOW_TO_GET, Page, find_chromium, open_browser

AXE = "axe-core@4.14.1"
SERIOUS = ("serious", "critical")
SIZES = ((1280, 860), (390, 844))  # of a desktop and a phone
SCHEMES = ("light", "dark")
NPM_SECONDS = 120.0


def main() -> int:
    """Prints a line per finding; returns 1 if one is serious, or if a tool is missing, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    path = parser.parse_args().page
    chromium, axe = find_chromium(), fetch_axe()
    if chromium is None or axe is None:
        print(HOW_TO_GET if chromium is None else "npm cannot fetch axe-core", file=sys.stderr)
        return 1
    with open_browser(chromium) as page:
        found = audit(page, path, axe)
    for each in found:
        print(each)
    return int(any(each.startswith(SERIOUS) for each in found))


def fetch_axe() -> str | None:
    """Returns the script of axe-core; None without npm or its registry."""
    if shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        options = ("--silent", "--no-save", "--no-audit", "--ignore-scripts", "--prefix", folder)
        command = ["npm", "install", *options, AXE]
        try:
            done = subprocess.run(command, capture_output=True, timeout=NPM_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return None
        script = Path(folder) / "node_modules" / "axe-core" / "axe.min.js"
        return None if done.returncode else script.read_text(encoding="utf-8")


def audit(page: Page, path: Path, axe: str) -> list[str]:
    """Returns the violations of a page, each as impact, rule, window and first element."""
    found = []
    for width, height in SIZES:
        for scheme in SCHEMES:
            page.resize(width, height).prefer(scheme).open(path.absolute().as_uri())
            page.wait_until("document.readyState == 'complete'")
            page.run("document.querySelectorAll('details').forEach(each => { each.open = true })")
            page.run(axe)
            page.run("axe.run().then(done => { window.audited = JSON.stringify(done.violations) })")
            violations: list[dict[str, Any]] = json.loads(page.wait_until("window.audited"))
            found += [
                f"{each['impact']} {each['id']} ({width} px, {scheme}): {node['html'][:160]}"
                for each in violations
                for node in each["nodes"][:3]
            ]
    page.prefer("light")
    return found


if __name__ == "__main__":
    sys.exit(main())
