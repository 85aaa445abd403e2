"""Laws of banners: first on the page, red and escaped; added to a finished page and removed."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from finished_run import HOSTILE
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.browser import Page
from grpo.params.parameters import Parameters
from grpo.report.page import write_page
from grpo.runtime.artifacts.marks import PAGE, Banner, changed_inputs, say, stamp

DIVERGED = Banner(title="train@sgpo-1 failed", text=f"update 3: the loss is nan {HOSTILE}")
OLD = Banner(title="This page is old", text="evaluate@sgpo-1 has run since it was drawn")
RED = "rgb(180, 35, 24)"


@pytest.fixture(scope="module")
def drawn_once(
    finished: Path, params: Parameters, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    workspace = tmp_path_factory.mktemp("drawn")
    artifacts = shutil.copytree(finished, workspace / "artifacts")
    with chdir(workspace):
        write_page(artifacts, params, artifacts / "report", [DIVERGED])
    return artifacts / "report"


@pytest.fixture
def drawn(artifacts: Path, drawn_once: Path) -> Path:
    """A page with one banner, in the working directory's usual place."""
    shutil.copytree(drawn_once, artifacts / "report")
    return PAGE


def test_a_banner_is_red_and_stands_above_everything_else(drawn: Path, browser: Page) -> None:
    stamp(drawn, [OLD])
    browser.resize(390, 860).open(drawn.absolute().as_uri())
    text = browser.wait_for("Reproduce")
    assert text.index(DIVERGED.title) < text.index(OLD.title) < text.index("Reward by compute")
    assert "<script>alert('rollout')</script>" in text  # shown, not run
    banners = "[...document.querySelectorAll('.banner')]"
    colors = browser.run(f"{banners}.map(e => getComputedStyle(e).backgroundColor)")
    assert colors == [RED] * 3  # of the two here, and of too few evaluation prompts
    assert browser.run(f"{banners}[0].getBoundingClientRect().top") < 100
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_what_is_stamped_on_a_page_comes_off_and_the_rest_stays(drawn: Path) -> None:
    before = drawn.read_text()
    stamp(drawn, [OLD, DIVERGED])
    stamp(drawn, [OLD])
    assert drawn.read_text().count(OLD.title) == 1
    stamp(drawn, [])
    assert drawn.read_text() == before


def test_where_no_page_is_none_is_stamped(tmp_path: Path) -> None:
    stamp(tmp_path / "index.html", [OLD])
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30)
@given(st.lists(st.builds(Banner, title=st.text(), text=st.text()), max_size=3))
def test_any_text_can_be_stamped_and_taken_off(banners: list[Banner]) -> None:
    page = Path("page.html")
    page.write_text("a<!-- stamps --><!-- /stamps -->b")
    stamp(page, banners)
    assert page.read_text().count('<p class="banner"') == len(banners)
    stamp(page, [])
    assert page.read_text() == "a<!-- stamps --><!-- /stamps -->b"


@pytest.fixture(autouse=True)
def _in_an_empty_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "prompts/train.parquet",
        "profile/summary.json",
        "rollouts/sgpo-1/table.parquet",
        "rewards/sgpo-1.parquet",
        "training/uniform-2/updates.csv",
        "evaluations/base.json",
    ],
)
def test_a_page_knows_which_of_its_inputs_has_changed(
    drawn: Path, artifacts: Path, name: str
) -> None:
    assert changed_inputs(drawn, artifacts) == []
    kept = (artifacts / name).read_bytes()
    (artifacts / name).write_bytes(kept + b"\n")
    assert changed_inputs(drawn, artifacts) == [name]
    (artifacts / name).unlink()
    assert changed_inputs(drawn, artifacts) == [name]
    (artifacts / name).write_bytes(kept)
    assert changed_inputs(drawn, artifacts) == []
    (artifacts / f"{name}.new").write_bytes(b"")
    assert changed_inputs(drawn, artifacts) == [f"{name}.new"]


def test_a_terminal_shows_a_line_per_banner_in_red_if_it_has_colors() -> None:
    assert say([OLD], is_colored=False) == f"WARNING {OLD.title}: {OLD.text}\n"
    assert say([OLD, OLD], is_colored=True).count("\x1b[1;31m") == 2
