"""Laws of the browser of rollouts: what it shows, what its filter keeps, and without a script."""

from pathlib import Path

import pytest
from finished_run import SUCCESSES, ReadWith

from benchmarks.accessibility import SERIOUS, audit, fetch_axe
from benchmarks.browser import Page
from grpo.params.parameters import Parameters
from grpo.report import page as pages
from grpo.report.browsing import embed_json, first_part, read_prompts_to_browse, show_rollout
from grpo.report.page import PAGE, ROLLOUTS, write_page
from grpo.runtime.artifacts.tables import EVALUATION, read_table, write_table

PATTERN = "#([^#]*)"
COUNT = "document.getElementById('rollout-count')?.textContent"
FORM = "document.getElementById('rollout-filter')"
SHOWN = "document.querySelectorAll('#rollout-list > li').length"


@pytest.fixture
def page(artifacts: Path, params: Parameters, figures_drawn_once: None) -> Path:
    """The page of the finished run, with one drawing of its figures for all tests."""
    write_page(artifacts, params, artifacts / "report")
    return artifacts / "report" / PAGE


@pytest.mark.parametrize(
    ("text", "is_right", "reference", "answer", "difference"),
    [
        ("3+4 #7", True, "7", "7", ""),
        ("3+4 #78", False, "7", "78", "8"),
        ("#1 #2945", False, "2145", "2945", "9"),  # the last match; 2 and 45 are shared
        ("#abab", False, "ab", "abab", "ab"),  # no character is shared twice
        ("#1", False, "12", "1", ""),  # nothing of it is wrong, but 2 is missing
        ("7", False, "7", "", ""),  # no answer
    ],
)
def test_the_answer_and_its_difference_by_hand(
    text: str, is_right: bool, reference: str, answer: str, difference: str
) -> None:
    shown, right, start, end, first, last = show_rollout(text, is_right, reference, PATTERN)
    assert (shown, right) == (text, is_right)
    assert shown[max(start, 0) : max(end, 0)] == answer
    assert shown[max(first, 0) : max(last, 0)] == difference
    assert (start == -1) == ("#" not in text)


def test_without_a_pattern_the_whole_text_is_the_answer() -> None:
    assert show_rollout("cat", False, "cut", None) == ("cat", False, 0, 3, 1, 2)


def test_every_prompt_has_the_rollout_of_every_policy(artifacts: Path, read_with: ReadWith) -> None:
    data = read_prompts_to_browse(artifacts, read_with())
    assert data["policies"] == list(SUCCESSES)
    assert data["families"] == ["f"]
    assert [each["prompt"] for each in data["prompts"]] == ["e0", "e1", "e2", "e3"]
    for i, name in enumerate(SUCCESSES):
        right = [each["rollouts"][i][1] for each in data["prompts"]]
        assert right == [count > 0 for count in SUCCESSES[name]]


def test_a_first_part_has_as_many_prompts_as_fit() -> None:
    data = {"families": ["f"], "prompts": ["aa", "bb", "cc"]}  # 4 bytes each as JSON
    assert first_part(data, 8)["prompts"] == ["aa", "bb"]
    assert first_part(data, 7)["prompts"] == ["aa"]


def test_data_cannot_end_its_element() -> None:
    assert "<" not in embed_json(["</script><script>"])


def test_a_run_without_first_rollouts_has_a_page_without_the_browser(
    artifacts: Path, params: Parameters, figures_drawn_once: None
) -> None:
    for name in SUCCESSES:
        path = artifacts / f"evaluations/{name}.parquet"
        table = read_table(path, EVALUATION).drop(columns=["first_text", "first_outcome"])
        write_table(table, path, EVALUATION)
    write_page(artifacts, params, artifacts / "report")
    assert 'id="rollout-data"' not in (artifacts / "report" / PAGE).read_text()


def test_prompts_that_do_not_fit_are_in_a_page_beside_it(
    artifacts: Path,
    params: Parameters,
    page: Path,
    browser: Page,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = page.with_name(ROLLOUTS.name)
    assert not beside.exists()
    data = read_prompts_to_browse(artifacts, pages.read_run(artifacts, params))
    size = len(embed_json(data["prompts"][0]).encode())
    monkeypatch.setattr(pages, "LARGEST_BYTES", size)
    write_page(artifacts, params, page.parent)
    for path, count in ((page, 1), (beside, 4)):
        browser.open(path.as_uri())
        assert browser.wait_until(COUNT) == f"{count} of {count} prompts, page 1 of 1"
    monkeypatch.undo()
    write_page(artifacts, params, page.parent)
    assert not beside.exists()


def test_the_filter_keeps_what_changed(page: Path, browser: Page) -> None:
    browser.open(page.as_uri())
    browser.wait_until(COUNT)
    # The first rollouts: base is right on two of four prompts, sgpo-1 on all.
    found = {}
    for change in ("all", "right", "wrong", "broken", "fixed"):
        browser.run(f"{FORM}.elements.change.value = '{change}'")
        browser.run(f"{FORM}.dispatchEvent(new Event('input'))")
        found[change] = browser.run(SHOWN)
    assert found == {"all": 4, "right": 2, "wrong": 0, "broken": 0, "fixed": 2}
    text = browser.run("document.getElementById('rollout-list').innerText")
    assert "Reference answer: 2" in text
    # base answered 1 instead of 2, and what follows it.
    marked = browser.run("document.querySelector('#rollout-list mark').textContent")
    assert marked.startswith("1 <script>")
    assert browser.run("document.querySelectorAll('#rollout-list script').length") == 0


def test_a_figure_opens_in_full_size_with_its_values_and_closes(page: Path, browser: Page) -> None:
    browser.open(page.as_uri())
    browser.wait_until(COUNT)
    browser.run("document.querySelector('#figures figure button').click()")
    assert browser.run("document.getElementById('full-size').open")
    titles = browser.run("document.querySelectorAll('#figures figure:first-child title').length")
    assert browser.run("document.querySelectorAll('#full-size li').length") == titles > 0
    browser.click("Close")
    assert not browser.run("document.getElementById('full-size').open")


def test_a_click_on_a_mark_shows_its_tooltip(page: Path, browser: Page) -> None:
    browser.open(page.as_uri())
    browser.wait_until(COUNT)
    mark = "document.querySelector('#figures svg g:has(> title)')"
    browser.run(f"{mark}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    shown = browser.run("document.querySelector('.tip').innerText")
    assert shown == browser.run(f"{mark}.querySelector('title').textContent")


def test_without_a_script_results_stay_readable(page: Path, browser: Page, tmp_path: Path) -> None:
    plain = tmp_path / "plain.html"
    # Another script than that of the digest does not run.
    plain.write_text(page.read_text().replace('"use strict";', '"use strict"; '))
    browser.open(plain.as_uri())
    text = browser.wait_for("Reproduce", "Learned?", "Families", "Side by side", "Browsing needs")
    assert "uniform-1 wrote 0" in text
    assert not browser.run(SHOWN)


@pytest.mark.long
def test_axe_finds_nothing_serious(page: Path, browser: Page) -> None:
    axe = fetch_axe()
    if axe is None:
        pytest.skip("axe-core is not available: npm is missing, or cannot reach its registry")
    bad = page.with_name("bad.html")
    bad.write_text("<!doctype html><html><body><img src='data:,'></body></html>")
    assert any("image-alt" in each for each in audit(browser, bad, axe))  # it does look
    found = audit(browser, page, axe)
    assert [each for each in found if each.startswith(SERIOUS)] == []
