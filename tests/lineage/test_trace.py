"""From an artifact back to prompts, code revision and parameters."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grpo.errors import ArtifactError
from grpo.lineage.graph import draw_svg, order_columns, reduce_edges
from grpo.lineage.trace import format_tree, trace
from tests import tiny_pipeline
from tests.files import contents


def test_every_artifact_leads_to_prompts_revision_and_parameters(workspace: Path) -> None:
    node = trace(Path("artifacts/evaluations/a-1.json"), workspace)
    stages = [each.stage.name for each in node.walk() if each.stage]
    assert stages == ["evaluate@a-1", "train@a-1", "base", "prepare"]
    text = format_tree(node)
    head = tiny_pipeline.run(workspace, "git", "rev-parse", "HEAD")[:12]
    assert f"revision {head}: base, evaluate@a-1, prepare, train@a-1" in text
    assert "data/prompts.txt" in text
    assert "  rounds.a-1.rate = 0.1" in text
    assert "  seed = 1" in text


def test_a_file_in_a_directory_is_traced_like_the_directory(workspace: Path) -> None:
    inside = trace(workspace / "artifacts/policies/a-1/model.txt", workspace)
    assert inside == trace(Path("artifacts/policies/a-1"), workspace)


def test_results_are_traced_to_the_commit_that_brought_them(workspace: Path) -> None:
    first = tiny_pipeline.run(workspace, "git", "rev-parse", "HEAD")[:12]
    tiny_pipeline.replace(workspace, "rate: 0.2", "rate: 0.3")
    tiny_pipeline.reproduce_in_process(workspace)
    report = Path("artifacts/report/metrics.json")
    assert f"revision {first} with uncommitted changes: eval" in format_tree(
        trace(report, workspace)
    )
    second = tiny_pipeline.commit(workspace, "another rate")[:12]
    text = format_tree(trace(report, workspace))
    assert f"revision {first}: base, evaluate@a-1, prepare, train@a-1" in text
    assert f"revision {second}: evaluate@b-1, report, train@b-1" in text


def test_an_input_that_changed_since_is_marked(workspace: Path) -> None:
    tiny_pipeline.replace(workspace, "rate: 0.2", "rate: 0.3")
    tiny_pipeline.reproduce_in_process(workspace, "train@b-1")
    evaluation = trace(Path("artifacts/evaluations/b-1.json"), workspace)
    assert evaluation.outdated == ("artifacts/policies/b-1",)
    assert "has changed since evaluate@b-1 read it" in format_tree(evaluation)
    assert trace(Path("artifacts/evaluations/a-1.json"), workspace).outdated == ()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("artifacts/report/index.html", "no stage in dvc.lock wrote it; try artifacts/report/metr"),
        ("artifacts/policies", "no stage in dvc.lock wrote it; try artifacts/policies/a-1, "),
        ("work.py", "no stage in dvc.lock wrote it; dvc.lock lists"),
        ("artifacts/policies/a-1/weights.txt", "no such file in artifacts/policies/a-1, which tr"),
        ("/elsewhere", "must lie in the workspace"),
        ("..", "must lie in the workspace"),
        (".", r"^\.: no stage in dvc.lock wrote it; dvc.lock lists what can be traced"),
    ],
)
def test_an_unknown_path_is_one_line(workspace: Path, path: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        trace(Path(path), workspace)


def test_the_drawing_holds_every_stage_and_nothing_from_elsewhere(workspace: Path) -> None:
    drawing = draw_svg(trace(Path("artifacts/report/metrics.json"), workspace))
    for stage in ("prepare", "base", "train@a-1", "train@b-1", "evaluate@a-1", "report"):
        assert f">{stage}</text>" in drawing
    assert drawing.count("http") == 1  # the name of the SVG language
    assert drawing == draw_svg(trace(Path("artifacts/report/metrics.json"), workspace))


def test_columns_follow_the_longest_way_and_edges_keep_lanes_free() -> None:
    graph = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}, "e": {"c", "d"}}
    reduced = reduce_edges(graph)
    assert reduced == {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"a"}, "e": {"c", "d"}}
    columns, ways = order_columns(reduced)
    assert columns == [["a"], ["b", "d"], ["c", "d>e>2"], ["e"]]
    assert ["d", "d>e>2", "e"] in ways


def test_tracing_imports_neither_torch_nor_mlflow() -> None:
    code = (
        "import sys, grpo.lineage.trace, grpo.lineage.graph\n"
        "sys.exit(bool({'torch', 'mlflow', 'prefect', 'dvc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_drawing_replaces_nothing_but_an_earlier_drawing(workspace: Path) -> None:
    def draw(target: str) -> "subprocess.CompletedProcess[str]":
        words = ["-m", "grpo", "lineage", "artifacts/policies/a-1", "--svg", target]
        return subprocess.run(
            [sys.executable, *words], cwd=workspace, capture_output=True, text=True
        )

    before = contents(workspace / "artifacts")
    for target in ("artifacts", "artifacts/policies/a-1", "dvc.yaml"):
        done = draw(target)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"{target}: must be free or an unchanged output")
    assert contents(workspace / "artifacts") == before
    for _ in range(2):
        assert draw("a.svg").returncode == 0
    ElementTree.parse(workspace / "a.svg")
