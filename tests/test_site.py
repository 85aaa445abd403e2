"""The documentation site builds offline, loads nothing external and has no dead link."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).parents[1]


def build(root: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Builds the site as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_pages_load_nothing_from_elsewhere(site: Path):
    loaded = re.compile(r'<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)="(?:https?:)?//')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.long
def test_the_api_lists_every_public_name(site: Path):
    shown = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    public = {name: getattr(grpo, name) for name in dir(grpo) if not name.startswith("_")}
    ours = {
        name: value.__module__
        for name, value in public.items()
        if getattr(value, "__module__", "").startswith("grpo")
    }
    assert {"Rollouts", "chain", "check", "rloo", "clip_surrogate"} <= ours.keys()
    for name, module in ours.items():
        assert f'id="{module}.{name}"' in shown, name


@pytest.mark.long
def test_a_file_of_the_repository_is_part_of_the_site(site: Path):
    assert "repository/recipes/smoke.yaml.html" in (site / "recipes.html").read_text()
    assert "rollouts_per_batch" in (site / "repository/recipes/smoke.yaml.html").read_text()
    name = "benchmarks/results/demo.json"
    assert (site / "repository" / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_dead_link_fails_the_build(tmp_path: Path):
    """To a page, to a heading, and to a file of the repository; on a site of one page."""
    shutil.copytree(ROOT / "docs/hooks", tmp_path / "docs/hooks")
    configuration = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(configuration.split("nav:\n  - ")[0])
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("[home](docs/index.md)\n")
    dead = ("no-page.md", "#no-heading", "../recipes/no-recipe.yaml")
    (tmp_path / "docs/index.md").write_text("".join(f"[dead]({each})\n" for each in dead))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for message in ("'no-page.md'", "'#no-heading'", "recipes/no-recipe.yaml, which is not a file"):
        assert message in done.stderr
