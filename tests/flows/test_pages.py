"""Pages as a member of a team sees them, in a browser: a run, its report, a version of a model."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from benchmarks.browser import Page
from benchmarks.screenshots import visit_run, visit_version
from grpo.lineage.lock import read_lock
from tests.flows.teams import MODEL, Team

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
GREEN = (35, 158, 77)  # of a stage that is done, in Prefect's graph
BLUE = (51, 119, 187)  # of a policy's bar, in the figure of the tiny report
LOWEST_PIXELS = 10  # the line below the graph, as green, is lower


def bars(picture: bytes, color: tuple[int, int, int], region: str) -> int:
    """Returns how many bars of one color a region of a picture shows.

    Args:
      region: left, top, right and bottom, as text.
    """
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    left, top, right, bottom = (round(float(each)) for each in region.split())
    near = np.abs(np.asarray(image, dtype=int)[top:bottom, left:right] - color).max(axis=2) < 25
    pieces, _ = ndimage.label(near)
    heights = [rows.stop - rows.start for rows, _ in ndimage.find_objects(pieces)]
    return sum(height >= LOWEST_PIXELS for height in heights)


def region_of(browser: Page, selector: str) -> str:
    place = f"document.querySelector({selector!r}).getBoundingClientRect()"
    return str(browser.run(f"(r => `${{r.left}} ${{r.top}} ${{r.right}} ${{r.bottom}}`)({place})"))


def test_the_pages_of_a_run_show_its_stages_as_a_graph_and_its_report(
    done: dict[str, Any], team: Team, browser: Page
) -> None:
    stages = [*read_lock(team.workspace), "push"]
    evaluated = ["base", "a-1", "a-2"]
    visit = visit_run(browser, team.prefect, done["id"])
    _, text = next(visit)
    assert all(f"\n{each}\n" in text for each in (*stages, "report", "stages", "progress"))
    assert bars(browser.picture(), GREEN, region_of(browser, "canvas")) >= len(stages)
    _, text = next(visit)
    assert all(f"{each} mean@8" in text for each in evaluated)
    browser.wait_until("document.images[0]?.naturalHeight")
    assert bars(browser.picture(), BLUE, region_of(browser, "img")) == len(evaluated)
    next(visit)
    assert bars(browser.picture(), BLUE, region_of(browser, "iframe")) == len(evaluated)


def test_a_version_of_a_model_leads_back_to_its_policy_and_what_made_it(
    promoted: Any, team: Team, browser: Page
) -> None:
    lock = read_lock(team.workspace)
    first, second = (lock[f"train@{each}"].outs[0] for each in ("a-1", "a-2"))
    visit = visit_version(browser, team.mlflow, MODEL, "2")
    _, text = next(visit)
    assert {"champion", "promoted:", second.digest} <= set(text.split())
    made = browser.address_of("train@a-2")
    _, text = next(visit)
    assert f"{second.path} ({second.digest})" in " ".join(text.split())
    browser.open(made)
    assert f"{first.path} ({first.digest})" in " ".join(browser.wait_for("Datasets", "Dep").split())
