"""The page of diverged training: a red banner and the curves until the divergence."""

import shutil
from pathlib import Path

import pytest

from grpo.errors import ArtifactError, DivergedError
from grpo.params.parameters import Parameters
from grpo.report.page import write_page
from grpo.runtime.artifacts.divergence import curves_kept

REASON = "training of sgpo-1 diverged at update 2: loss is nan; lower arms.sgpo.<rate>"
SHOWN = "training of sgpo-1 diverged at update 2: loss is nan; lower arms.sgpo.&lt;rate&gt;"


def diverge(rows: int) -> None:
    updates = [{"update": i, "loss": 0.5 + i, "audit_cosine": None} for i in range(rows)]
    with pytest.raises(DivergedError), curves_kept("train@sgpo-1", updates):
        raise DivergedError(REASON)


@pytest.mark.parametrize("rows", [0, 2])
def test_the_page_shows_a_divergence_where_there_is_no_result(
    artifacts: Path, params: Parameters, tmp_path: Path, rows: int
):
    shutil.rmtree(artifacts / "training/sgpo-1")  # as DVC leaves a stage that failed
    with pytest.raises(ArtifactError):
        write_page(artifacts, params, tmp_path)
    diverge(rows)
    write_page(artifacts, params, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert f'class="banner" role="alert"><strong>train@sgpo-1 diverged</strong> {SHOWN}' in page
    assert page.count("<svg") == (rows > 0)


@pytest.mark.usefixtures("figures_drawn_once")
def test_a_divergence_stands_above_older_results_until_the_stage_succeeds(
    artifacts: Path, params: Parameters, tmp_path: Path
):
    write_page(artifacts, params, tmp_path)
    before = (tmp_path / "index.html").read_text()
    diverge(2)
    write_page(artifacts, params, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert SHOWN in page
    assert page.count("<svg") == before.count("<svg") + 1
    with curves_kept("train@sgpo-1"):
        pass
    write_page(artifacts, params, tmp_path)
    assert (tmp_path / "index.html").read_text() == before
