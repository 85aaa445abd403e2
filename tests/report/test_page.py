"""Laws of the page: self-contained, escaped, readable, and the same figures each time."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from finished_run import EVALUATION_FLOPS, HOSTILE, WARMUP_FLOPS, ReadWith
from PIL import Image, ImageColor

from benchmarks.browser import Page
from benchmarks.first_run import SIZE, picture_report
from benchmarks.screenshots import DEVICES, picture_on_devices
from grpo.modalities import all_modalities
from grpo.params.parameters import JudgeParams, Parameters, read_params
from grpo.report.figures import LABEL_OF_KIND, draw_flops_by_kind
from grpo.report.numbers import compute_numbers, signal_by_difficulty
from grpo.report.page import PAGE, SCRIPT, write_page
from grpo.report.reading import read_run
from grpo.report.seconds import ACTIVITIES, ACTIVITY_OF_PART, stages_of
from grpo.report.signal_figures import DIFFICULTY, NO_PROFILE, draw_signal_by_step
from grpo.report.style import KIND_COLORS, PAGE_COLORS, color_of
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.tables import (
    EVALUATION,
    PROFILE,
    empty_table,
    read_table,
    write_table,
)
from grpo.runtime.artifacts.usage import Usage

FETCHING = {"src", "href", "xlink:href", "data", "action", "srcset", "poster"}
VOID = {"meta", "br", "input"}


class Reader(HTMLParser):
    """Collects a page's links, texts of tags, and tags that were never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in FETCHING]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


@pytest.fixture(scope="module")
def page(finished: Path, params: Parameters, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the finished run, in a workspace where nothing was measured."""
    out = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        write_page(finished, params, out)
    return (out / PAGE).read_text()


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_text_of_a_rollout_is_shown_and_never_run(page: str) -> None:
    reader = read(page)
    data, script = reader.scripts
    assert script == SCRIPT.read_text()
    assert "<" not in data
    assert HOSTILE in json.loads(data)["prompts"][0]["rollouts"][0][0].replace("\\x1b", "\x1b")
    assert "b" not in reader.tags
    # Shown as it was written, the control character spelled out.
    assert r"<script>alert('rollout')</script>\x1b[31m & <b>bold</b>" in reader.text


def test_only_the_own_script_may_run_and_nothing_may_be_fetched(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode()
    allowed = dict(each.split(" ", 1) for each in policy.split("; "))
    assert allowed == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_headings_descend_one_level_at_a_time(page: str) -> None:
    levels = [int(tag[1]) for tag in read(page).tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_header_cell_has_a_scope_and_every_figure_a_name(page: str) -> None:
    assert re.findall(r"<th(?![^>]*scope=)(?: [^>]*)?>", page) == []
    assert re.findall(r"<svg (?![^>]*aria-label=)", page) == []


def test_every_value_of_a_curve_has_a_tooltip(page: str) -> None:
    figure = page.partition("Reward by compute</h3>")[2].partition("</figure>")[0]
    tips = re.findall(r"<title>([^<]*)</title>", figure)
    assert "uniform: uniform-2, 0.750 after 200\N{NO-BREAK SPACE}FLOP" in tips
    assert "sgpo: sgpo-1, 0.875 after 100\N{NO-BREAK SPACE}FLOP" in tips
    assert "sgpo reaches it after 90\N{NO-BREAK SPACE}FLOP" in tips
    assert "uniform: 90\N{NO-BREAK SPACE}% interval" in tips


def test_the_page_fetches_nothing(page: str) -> None:
    assert all(link.startswith("#") for link in read(page).links)
    assert not re.search(r"@import|url\((?!#)", page)


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_and_fetches_nothing(
    page: str, width: int, browser: Page, tmp_path: Path
) -> None:
    (tmp_path / PAGE).write_text(page)
    browser.resize(width, 860).open((tmp_path / PAGE).as_uri())
    text = " ".join(browser.wait_for("Reproduce").split())
    assert "sgpo reached uniform's final mean@4 of 0.750 with 55 % less compute" in text
    assert browser.run("document.documentElement.scrollWidth") <= width
    drawn = browser.run("[...document.querySelectorAll('svg')].map(e => e.clientHeight)")
    assert min(drawn) > 50
    assert browser.run("performance.getEntriesByType('resource').length") == 0


def test_the_picture_for_the_readme_shows_the_curves_of_both_arms(
    page: str, browser: Page, tmp_path: Path
) -> None:
    (tmp_path / PAGE).write_text(page)
    picture_report(browser, tmp_path / PAGE, tmp_path / "report.png")
    picture = Image.open(tmp_path / "report.png").convert("RGB")
    assert picture.size == SIZE
    of_arms = [ImageColor.getrgb(color_of(arm)) for arm in range(2)]
    near = [np.abs(np.asarray(picture, dtype=int) - color).max(axis=2) < 25 for color in of_arms]
    assert all(each.sum() > 100 for each in near)


def test_pictures_for_the_docs_differ_by_device_and_scheme(
    page: str, browser: Page, tmp_path: Path
) -> None:
    (tmp_path / PAGE).write_text(page)
    pictures = picture_on_devices(browser, tmp_path / PAGE, tmp_path)
    assert [each.name for each in pictures] == [
        "report-desktop-light.png",
        "report-desktop-dark.png",
        "report-phone-light.png",
        "report-phone-dark.png",
    ]
    shown = [Image.open(each).convert("RGB") for each in pictures]
    assert [each.size for each in shown] == [size for size in DEVICES.values() for _ in range(2)]
    paper = [ImageColor.getrgb(color) for color in PAGE_COLORS["paper"]]
    for i, each in enumerate(shown):
        corner = np.abs(np.asarray(each, dtype=int)[2, 2] - paper[i % 2])
        assert corner.max() < 8


def test_the_page_fits_a_phone_and_says_what_was_found(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    text = " ".join(read(page).text.split())
    assert "sgpo reached uniform's final mean@4 of 0.750 with 55 % less compute" in text
    assert "sgpo needed 90 FLOP where uniform needed 200 FLOP" in text
    assert "no figures over seconds" in text.lower()


def test_steps_that_the_profile_sampled_are_told_apart(page: str) -> None:
    text = " ".join(read(page).text.split())
    # sgpo: 10 * (50 + 30 + 20), of which 10 * 50 the profile's; uniform reads none.
    assert "1 000 sampled500 of them by the profile" in text
    assert text.count("of them by the profile") == 1


@pytest.mark.parametrize("recipe", ["smoke", "glyphs", "manipulation"])
def test_the_steps_of_a_figure_are_those_of_the_policy(read_with: ReadWith, recipe: str) -> None:
    run = read_with()
    policy = read_params(Path(__file__).parents[2] / f"recipes/{recipe}.yaml").policy
    svg = draw_signal_by_step(
        replace(run, params=run.params.model_copy(update={"policy": policy}))
    ).svg
    units = {name: each.step_name for name, each in all_modalities().items()}
    assert [unit for unit in units.values() if unit in svg] == [units[policy.kind]]


def test_every_bar_of_compute_has_the_same_length_per_flop(read_with: ReadWith) -> None:
    run = read_with()
    svg = draw_flops_by_kind(run, compute_numbers(run)).svg
    found = re.findall(r'<path d="([^"]*)" clip-path[^>]* style="fill: ([^"]*)"', svg)
    flops = {"profile": [50], "sampling": [120, 30], "update": [80, 20],
             "evaluation": [4 * EVALUATION_FLOPS], "warmup": [WARMUP_FLOPS]}  # fmt: skip
    per_flop = []
    for kind, amounts in flops.items():
        points = [re.findall(r"[ML] ([\d.]+) ", path) for path, color in found
                  if KIND_COLORS[kind] in color]  # fmt: skip
        widths = [max(map(float, xs)) - min(map(float, xs)) for xs in points]
        widths = [width for width in widths if width > 0]  # no profile counts for uniform
        per_flop += [width / flop for width, flop in zip(widths, amounts, strict=True)]
    assert per_flop == pytest.approx([per_flop[0]] * 7, rel=0.01)


def test_prompts_are_counted_by_their_success_rate(page: str) -> None:
    """Of four prompts with four rollouts, the base solves two never and two twice."""
    tips = re.findall(r"<title>(base|sgpo-1): (\d+)% of prompts</title>", page)
    assert [int(share) for name, share in tips if name == "base"] == [50, 0, 50, 0, 0]
    assert [int(share) for name, share in tips if name == "sgpo-1"] == [0, 0, 0, 50, 50]


def test_unsound_combinations_are_on_the_page(page: str) -> None:
    # U18: sgpo's groups differ in size, and grpo scales by the deviation of each.
    assert re.search(r"<strong>WARN</strong> <code>arms\.sgpo\.objective\S*</code>", page)


def test_every_kind_of_rollout_is_shown_per_round(page: str) -> None:
    for tag in ("solved", "not solved", "unparsable"):
        assert page.count(f">{tag}</span>") == 3  # rounds


def test_the_page_without_seconds_is_the_same_bytes_twice(
    page: str, artifacts: Path, params: Parameters
) -> None:
    write_page(artifacts, params, artifacts / "again")
    assert (artifacts / "again" / PAGE).read_text() == page


@pytest.mark.usefixtures("figures_drawn_once")
def test_measured_seconds_are_compared_when_every_stage_has_them(
    read_with: ReadWith, artifacts: Path, params: Parameters
) -> None:
    read_with()
    for name in params.rounds:
        for stage, part in {"rollout": "sampling", "score": "judging", "train": "update"}.items():
            usage = Usage(seconds=10.0, seconds_by_part={"load": 1.0, part: 7.0})
            write_json(Path(".runs") / f"{stage}@{name}.json", asdict(usage))
    write_json(Path(".runs/profile.json"), asdict(Usage(seconds=6.0)))
    write_page(artifacts, params, artifacts / "report")
    text = " ".join(read((artifacts / "report" / PAGE).read_text()).text.split())
    # uniform: 60 s. sgpo: 0.25 at 6 s, 0.875 at 36 s: 0.75 at 6 + 0.8 * 30 = 30 s.
    assert "sgpo needed 50 % less: 30.0 s instead of 1 min 00 s" in text


def test_every_activity_that_took_seconds_is_drawn(
    read_with: ReadWith, artifacts: Path, params: Parameters
) -> None:
    read_with()
    parts = dict.fromkeys(ACTIVITY_OF_PART, 1.0)
    for stage in stages_of(params):
        usage = Usage(seconds=len(parts) + 1.0, seconds_by_part=parts)  # a second of something else
        write_json(Path(".runs") / f"{stage}.json", asdict(usage))
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    figure = page.partition("Where the time went")[2].partition("</figure>")[0]
    labels = [LABEL_OF_KIND.get(each, each) for each in ACTIVITIES]
    assert [each for each in labels if each not in figure] == []


@pytest.mark.usefixtures("figures_drawn_once")
def test_every_score_has_its_gain_over_the_base_beside_it(
    artifacts: Path, params: Parameters, judged: Parameters, tmp_path: Path
) -> None:
    pages = {}
    for name, each in (("plain", params), ("judged", judged)):
        write_page(artifacts, each, tmp_path / name)
        pages[name] = (tmp_path / name / PAGE).read_text()
    # Greedy and pass@k of two arms; the scores of the judge, sampled and greedy.
    assert pages["plain"].count("<small>over base +") == 4
    assert pages["judged"].count("<small>over base +") == 4 + 4
    assert "ocr, greedy" in read(pages["judged"]).text


@pytest.mark.usefixtures("figures_drawn_once")
def test_judges_are_compared_with_those_of_the_evaluation_and_corpora_are_shown(
    artifacts: Path, params: Parameters, judged: Parameters, tmp_path: Path
) -> None:
    others = [JudgeParams(judge="exact", model=None, score_range=None)]
    evaluation = params.evaluation.model_copy(update={"judges": others})
    write_page(artifacts, judged.model_copy(update={"evaluation": evaluation}), tmp_path)
    text = read((tmp_path / PAGE).read_text()).text
    assert "ocr and exact1.0001.0001.000" in text  # both give every prompt the same score
    assert "chrf of f, greedy0.2500.7500.875" in text
    constant = read_table(artifacts / "evaluations/base.parquet", EVALUATION)
    constant["score.ocr"] = 0.5
    write_table(constant, artifacts / "evaluations/base.parquet", EVALUATION)
    write_page(artifacts, judged.model_copy(update={"evaluation": evaluation}), tmp_path)
    assert "ocr and exact\N{EM DASH}1.0001.000" in read((tmp_path / PAGE).read_text()).text


def test_an_arm_that_never_gets_there_still_has_a_page(
    read_with: ReadWith, artifacts: Path, params: Parameters
) -> None:
    read_with({"sgpo-1": [0, 0, 1, 1]})
    write_page(artifacts, params, artifacts / "report")
    assert "never reached" in (artifacts / "report" / PAGE).read_text()


def test_a_page_without_a_profile_says_so_and_shows_all_prompts_as_one(
    artifacts: Path, params: Parameters, tmp_path: Path
):
    write_table(
        empty_table(PROFILE), artifacts / "profile/prompts.parquet", PROFILE, allow_empty=True
    )
    unread = params.model_copy(update={"arms": dict.fromkeys(params.arms, params.arms["uniform"])})
    write_page(artifacts, unread, tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert NO_PROFILE in page
    assert DIFFICULTY not in page
    signal = signal_by_difficulty(read_run(artifacts, unread))
    assert set(signal["bucket"]) == {"all prompts"}
    assert set(signal["rollouts"]) == {4}
