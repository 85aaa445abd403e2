"""Laws of samples side by side: same prompts, one cell per policy, marks that equal outcomes."""

import base64
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from finished_run import HOSTILE, SUCCESSES, ReadWith

from benchmarks.browser import Page
from grpo.errors import ArtifactError
from grpo.modalities.shared.exhibits import embed
from grpo.params.parameters import Parameters, read_params
from grpo.report.page import PAGE, write_page
from grpo.report.side_by_side import read_sheets
from grpo.runtime.artifacts.media import encode_png
from grpo.runtime.artifacts.tables import EVALUATION_SAMPLES, read_table, write_table
from grpo.runtime.artifacts.tensors import write_tensors

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]+)" width="(\d+)" height="(\d+)"')
MARK = re.compile(r'role="img" aria-label="(right|wrong)">([✓✗])<')
PROMPTS, ROLLOUTS = 4, 2  # of finished_run.py's samples
COLUMNS = 3 + 2  # base, uniform-1 and uniform-2; base and sgpo-1

Change = Callable[[pd.DataFrame], pd.DataFrame]


def change_samples(artifacts: Path, name: str, change: Change) -> None:
    path = artifacts / f"evaluations/{name}.samples.parquet"
    write_table(change(read_table(path, EVALUATION_SAMPLES)), path, EVALUATION_SAMPLES)


def drawn(level: int) -> np.ndarray:
    return np.full((1, 2, 4), level, dtype=np.uint8)


@pytest.fixture
def drawing(params: Parameters) -> Parameters:
    """The run's parameters with a policy that draws."""
    recipe = read_params(Path(__file__).parents[2] / "recipes" / "glyphs.yaml")
    arms = dict.fromkeys(params.arms, recipe.arms["flow"])
    same = {"task": recipe.task, "policy": recipe.policy, "reward": recipe.reward, "arms": arms}
    return params.model_copy(update=same)


@pytest.fixture
def drawn_artifacts(artifacts: Path, drawing: Parameters) -> Path:
    """The run as if its rollouts were images, each sample and each rollout of its own gray."""
    for i, name in enumerate(SUCCESSES):
        gray = [encode_png(drawn(50 * i + row)) for row in range(PROMPTS * ROLLOUTS)]
        change_samples(artifacts, name, lambda table, gray=gray: table.assign(image=gray))
    for name in drawing.rounds:
        media = np.stack([drawn(200 + row) for row in range(4)])
        write_media(artifacts, name, media)
    return artifacts


def write_media(artifacts: Path, name: str, media: np.ndarray) -> None:
    tensors = {"media": torch.from_numpy(media)}
    write_tensors(artifacts / f"rollouts/{name}/tensors.safetensors", tensors)


def section(artifacts: Path, params: Parameters, name: str) -> str:
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_columns_are_the_chain_and_rows_the_same_prompts(
    artifacts: Path, read_with: ReadWith
) -> None:
    uniform, sgpo = read_sheets(artifacts, read_with())
    assert uniform.policies == ["base", "uniform-1", "uniform-2"]
    assert sgpo.policies == ["base", "sgpo-1"]
    assert [each.prompt for each in uniform.rows] == [each.prompt for each in sgpo.rows]
    assert [each.prompt for each in sgpo.rows] == [f"{i}+1=" for i in range(PROMPTS)]
    # Of texts the first rollout: right from the first success on. base 0 0 2 2, then 1 1 3 3.
    assert (uniform.num_right, uniform.num_shown) == ([2, 4, 4], PROMPTS)
    assert [[look.is_right for look in row.cells[0]] for row in uniform.rows] == [
        [False],
        [False],
        [True],
        [True],
    ]
    assert uniform.rows[0].cells[1][0].text.startswith("uniform-1 wrote 0 &")


def test_what_a_policy_wrote_is_shown_escaped_with_its_mark(
    artifacts: Path, params: Parameters
) -> None:
    shown = section(artifacts, params, "side-by-side")
    marks = MARK.findall(shown)
    assert set(marks) == {("right", "✓"), ("wrong", "✗")}
    assert len(marks) == PROMPTS * COLUMNS
    # base is wrong on two prompts, in both sheets.
    assert marks.count(("wrong", "✗")) == 2 * 2
    assert "<script" not in shown
    assert shown.count("sgpo-1 wrote 0") == PROMPTS
    assert HOSTILE.partition(">")[0].replace("<", "&lt;") in shown
    assert "<img" not in shown


def test_every_rollout_of_a_cell_is_an_image_with_a_mark_that_equals_its_outcome(
    drawn_artifacts: Path, drawing: Parameters
) -> None:
    shown = section(drawn_artifacts, drawing, "side-by-side")
    images = IMAGE.findall(shown)
    assert len(images) == PROMPTS * COLUMNS * ROLLOUTS
    # Sharp at a whole multiple: 4 pixels become 96.
    assert {(width, height) for _, width, height in images} == {("96", "48")}
    assert shown.count('class="enlarged"') == len(images)
    gray_of = {base64.b64encode(encode_png(drawn(gray))).decode(): gray for gray in range(256)}
    words = [word for word, _ in MARK.findall(shown)]
    expected = [
        (50 * list(SUCCESSES).index(name) + ROLLOUTS * row + member, member < SUCCESSES[name][row])
        for chain in (["base", "uniform-1", "uniform-2"], ["base", "sgpo-1"])
        for row in range(PROMPTS)
        for name in chain
        for member in range(ROLLOUTS)
    ]
    found = [(gray_of[uri], word == "right") for (uri, *_), word in zip(images, words, strict=True)]
    assert found == expected


def test_a_round_shows_the_images_of_the_rollouts_it_chose(
    drawn_artifacts: Path, drawing: Parameters
) -> None:
    shown = section(drawn_artifacts, drawing, "rollouts")
    chosen = [2, 3, 1]  # rows of the table: solved, not solved, unparsable
    wanted = [base64.b64encode(encode_png(drawn(200 + row))).decode() for row in chosen]
    assert [uri for uri, *_ in IMAGE.findall(shown)] == wanted * len(drawing.rounds)
    assert "(empty)" not in shown


def test_a_page_with_images_fetches_nothing_and_is_the_same_bytes_twice(
    drawn_artifacts: Path, drawing: Parameters
) -> None:
    pages = []
    for out in ("first", "second"):
        write_page(drawn_artifacts, drawing, drawn_artifacts / out)
        pages.append((drawn_artifacts / out / PAGE).read_bytes())
    assert pages[0] == pages[1]
    links = re.findall(r'(?:src|href)="([^"]*)"', pages[0].decode())
    assert all(each.startswith(("#", "data:image/png;base64,")) for each in links)


def test_a_large_image_is_shown_smaller_and_smooth() -> None:
    picture = embed(encode_png(np.zeros((3, 80, 160), dtype=np.uint8)), longest_pixels=96)
    assert (picture.width, picture.height, picture.is_enlarged) == (96, 48, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.iloc[:-1], "must hold the rollouts of .*base.samples.parquet"),
        (lambda table: table.assign(prompt="2+2="), "must hold the rollouts of .*base"),
        (lambda table: table.iloc[::-1], "must hold the rollouts of .*base"),
    ],
)
def test_samples_of_other_rollouts_are_not_put_side_by_side(
    artifacts: Path, read_with: ReadWith, change: Change, message: str
) -> None:
    change_samples(artifacts, "sgpo-1", change)
    with pytest.raises(ArtifactError, match=rf"sgpo-1\.samples\.parquet: {message}") as caught:
        read_sheets(artifacts, read_with())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [None, 0, 100])
def test_missing_or_broken_samples_are_named_in_one_line(
    artifacts: Path, read_with: ReadWith, keep: int | None
) -> None:
    path = artifacts / "evaluations/uniform-1.samples.parquet"
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])
    with pytest.raises(
        ArtifactError, match=r"uniform-1\.samples\.parquet: (no such|must)"
    ) as caught:
        read_sheets(artifacts, read_with())
    assert "\n" not in str(caught.value)


def test_missing_images_of_a_round_are_named_in_one_line(
    drawn_artifacts: Path, drawing: Parameters
) -> None:
    write_media(drawn_artifacts, "sgpo-1", np.zeros((2, 1, 2, 4), dtype=np.uint8))
    message = r"rollouts/sgpo-1/tensors\.safetensors: 'media' must have at least 4 rows, got 2"
    with pytest.raises(ArtifactError, match=message):
        write_page(drawn_artifacts, drawing, drawn_artifacts / "report")
    (drawn_artifacts / "rollouts/sgpo-1/tensors.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"sgpo-1/tensors\.safetensors: no such file"):
        write_page(drawn_artifacts, drawing, drawn_artifacts / "report")


def test_an_image_opens_in_full_size_by_key(
    drawn_artifacts: Path, drawing: Parameters, browser: Page
) -> None:
    write_page(drawn_artifacts, drawing, drawn_artifacts / "report")
    browser.open((drawn_artifacts / "report" / PAGE).as_uri())
    image = "document.querySelector('.shown img')"
    browser.wait_until(f"{image}?.tabIndex == 0")
    key = "new KeyboardEvent('keydown', {key: 'Enter'})"
    assert browser.run(f"{image}.dispatchEvent({key})")
    large = "document.querySelector('#full-size img')"
    assert browser.run(f"document.getElementById('full-size').open && {large}.src == {image}.src")
    assert browser.run(f"{large}.clientWidth > {image}.clientWidth")
