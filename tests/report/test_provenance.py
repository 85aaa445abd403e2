"""Laws of the page's parameters: they come from dvc.lock, and differences are red banners."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo.__main__ import main
from grpo.errors import ArtifactError, ParameterError
from grpo.lineage.lock import flatten, read_lock
from grpo.params.parameters import Parameters
from grpo.params.yaml import value_at
from grpo.report.provenance import find_completed_run
from grpo.report.seconds import stages_of
from grpo.runtime.artifacts.files import write_json
from grpo.runtime.artifacts.marks import PAGE, fail, marked, read_marks
from grpo.runtime.artifacts.tables import REWARDS, read_table, write_table

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

PIPELINE = yaml.safe_load((Path(__file__).parents[2] / "dvc.yaml").read_text())
RATE = "arms.uniform.training.learning_rate"

Change = Callable[[dict[str, Any]], None]
Command = Callable[[str], str]


def set_leaf(path: str, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        *inner, last = path.split(".")
        for part in inner:
            content = content[int(part) if isinstance(content, list) else part]
        content[int(last) if isinstance(content, list) else last] = value

    return change


def lock_of(content: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    """Returns dvc.lock as a run of these stages with these parameters leaves it."""
    return {name: entry_of(name, content) for name in stages}


def entry_of(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Returns a stage's entry: what dvc.yaml lets it read, and one out that stands for all."""
    group, _, key = name.partition("@")
    stage = PIPELINE["stages"][group]
    arm = content["rounds"].get(key, {}).get("arm", "")
    spelled = yaml.safe_dump(stage.get("do", stage).get("params", []))
    spelled = spelled.replace("${key}", key).replace("${item.arm}", arm)
    values = {path: value_at(content, path) for path in yaml.safe_load(spelled)}
    out = {"path": f".work/{name}.json", "md5": "0" * 32}
    return {"cmd": name, "params": {"params.yaml": values}, "outs": [out]}


@pytest.fixture(autouse=True)
def _enough_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished run has four."""
    monkeypatch.setattr("grpo.report.learned.LEAST_PROMPTS", 4)


@pytest.fixture
def content(artifacts: Path, params: Parameters) -> dict[str, Any]:
    """The content of params.yaml; a run with it has written artifacts, dvc.lock and a page."""
    content: dict[str, Any] = params.model_dump(mode="json")
    write(content)
    stages = [*stages_of(params), "report"]
    write_lock(lock_of(content, stages))
    for name in stages:
        write_json(Path(f".work/{name}.json"), {})
    return content


def write(content: dict[str, Any]) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def write_lock(stages: dict[str, Any]) -> None:
    text = yaml.safe_dump({"schema": "2.0", "stages": deepcopy(stages)}, sort_keys=False)
    Path("dvc.lock").write_text(text)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `python -m grpo NAME` and returns all that it prints, without line breaks."""

    def run(name: str) -> str:
        monkeypatch.setattr("sys.argv", ["grpo", name])
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    return run


def banners() -> list[str]:
    """Returns the banners of the page, as text."""
    parts = PAGE.read_text().split('class="banner" role="alert">')[1:]
    return [each.partition("</p>")[0] for each in parts]


def parameters_shown() -> Any:
    text = PAGE.read_text().partition('<pre class="card">')[2].partition("</pre>")[0]
    return yaml.safe_load(text.replace("&#39;", "'").replace("&#34;", '"'))


def test_a_page_and_a_summary_of_what_ran_have_no_banner(
    content: dict[str, Any], command: Command
) -> None:
    assert "WARNING" not in command("report") + command("summary")
    assert banners() == []
    assert parameters_shown() == content


def test_the_page_shows_what_ran_and_says_that_params_yaml_is_another(
    content: dict[str, Any], command: Command
) -> None:
    """A run with 2e-4, then 0.777 in the file, then `grpo report`."""
    changed = deepcopy(content)
    set_leaf(RATE, 0.777)(changed)
    write(changed)
    said = [command("report"), command("summary")]
    assert parameters_shown() == content
    (banner,) = banners()
    for text in (*said, banner):
        assert "params.yaml differs from the run" in text
        assert (
            f"{RATE} is 0.777 there, but 0.0002 in curriculum@uniform, train@uniform-1, "
            "train@uniform-2" in text
        )


@pytest.mark.parametrize("path", ["seed", "evaluation.confidence", "arms.sgpo.sampling.top_p"])
def test_every_parameter_of_a_stage_is_compared(
    content: dict[str, Any], command: Command, path: str
) -> None:
    changed = deepcopy(content)
    set_leaf(path, 1 if path == "seed" else 0.5)(changed)
    write(changed)
    assert path in command("summary")
    assert find_completed_run().params.model_dump(mode="json") == content


def test_no_parameter_is_forgotten(content: dict[str, Any]) -> None:
    """All but who samples, which changes no byte, are in some stage's entry."""
    lock = read_lock(Path())
    recorded = {leaf for entry in lock.values() for leaf in entry.params}
    # Not what judges and shapes alike, which several stages name in part.
    assert {leaf for leaf in flatten(content) if leaf not in recorded} <= {
        leaf for leaf in flatten(content) if leaf.startswith("sampling.")
    }


def test_stages_that_ran_with_different_values_are_told_apart(
    content: dict[str, Any], command: Command
) -> None:
    other = deepcopy(content)
    set_leaf(RATE, 0.5)(other)
    lock = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    write_lock({**lock, "train@uniform-1": entry_of("train@uniform-1", other)})
    assert f"{RATE} is 0.0002 there, but 0.5 in train@uniform-1." in command("summary")


def test_a_round_that_did_not_run_is_not_shown_and_said(
    content: dict[str, Any], command: Command
) -> None:
    changed = deepcopy(content)
    new = {"arm": "uniform", "start": "uniform-2", "phase": 1}
    changed["rounds"] |= {"uniform-3": new, "uniform-4": {**new, "start": "uniform-3"}}
    write(changed)
    assert "uniform-3, uniform-4 of params.yaml did not finish" in command("report")
    assert list(parameters_shown()["rounds"]) == list(content["rounds"])


def test_a_round_that_was_taken_out_is_still_what_ran(
    content: dict[str, Any], command: Command
) -> None:
    changed = deepcopy(content)
    del changed["rounds"]["sgpo-1"], changed["arms"]["sgpo"]
    write(changed)
    assert "sgpo-1 ran, but params.yaml no longer has them" in command("report")
    assert parameters_shown() == content
    assert "sgpo mean@4" in command("summary")
    assert list(find_completed_run(is_stage=True).params.rounds) == ["uniform-1", "uniform-2"]


def test_without_a_lock_nobody_knows_what_ran(content: dict[str, Any], command: Command) -> None:
    Path("dvc.lock").unlink()
    assert "Parameters of the run are unknown" in command("report")
    assert "Parameters of the run are unknown" in banners()[0]


def test_where_no_round_has_run_there_is_no_page(content: dict[str, Any], command: Command) -> None:
    write_lock(lock_of(content, ["check", "prepare", "base"]))
    assert "no round of params.yaml has run" in command("report")
    assert not PAGE.exists()


def test_a_result_of_something_that_was_made_again_is_out_of_date(
    content: dict[str, Any], command: Command
) -> None:
    lock = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    made = {"path": ".work/base.json", "md5": "1" * 32}  # another one than base.json is by now
    lock["evaluate@sgpo-1"]["deps"] = [made]
    write_lock(lock)
    assert "Inputs of evaluate@sgpo-1 have changed since" in command("report")
    assert len(banners()) == 1


def test_a_failed_stage_stands_on_the_page_and_the_terminal_until_it_is_no_longer_due(
    content: dict[str, Any], command: Command
) -> None:
    command("report")
    out = Path(".work/train@uniform-1.json")
    out.unlink()  # as DVC does before it runs the stage
    fail("train@uniform-1", ParameterError("update 3: the loss is nan"))
    for _ in range(2):  # on the page as it is, then drawn again
        (banner,) = banners()
        assert "train@uniform-1 failed</strong> update 3: the loss is nan" in banner
        said = command("summary") + command("report")
        assert said.count("WARNING train@uniform-1 failed: update 3: the loss is nan") == 2
    write_json(out, {})  # as DVC restores it when the parameters are what they were
    assert "WARNING" not in command("report") + command("summary")
    assert banners() == []
    assert read_marks() == []


def test_the_mark_of_a_round_that_was_taken_out_says_nothing(
    content: dict[str, Any], command: Command
) -> None:
    fail("train@no-longer", ParameterError("no"))
    command("report")
    assert banners() == []


def test_a_page_that_cannot_be_drawn_again_says_so_on_the_one_that_is_there(
    content: dict[str, Any], command: Command, artifacts: Path
) -> None:
    command("report")
    (artifacts / "evaluations/sgpo-1.json").unlink()
    assert "sgpo-1.json: no such file" in command("report")
    (banner,) = banners()
    assert "report failed" in banner
    assert "sgpo-1.json: no such file" in banner
    assert "older than its inputs" in command("summary")


def test_a_summary_says_that_the_page_is_older_than_its_inputs(
    content: dict[str, Any], command: Command, artifacts: Path
) -> None:
    command("report")
    scores = json.loads((artifacts / "evaluations/sgpo-1.json").read_text())
    scores["mean_at_k"]["value"] = 0.125
    write_json(artifacts / "evaluations/sgpo-1.json", scores)
    said = command("summary")
    assert "The page is older than its inputs" in said
    assert "artifacts/evaluations/sgpo-1.json" in said
    assert "WARNING" not in command("report") + command("summary")


def test_a_stage_that_ran_since_makes_the_page_old_until_it_is_drawn(
    content: dict[str, Any], command: Command, artifacts: Path
) -> None:
    command("report")
    with marked("score@sgpo-1", [Path("artifacts/rewards/sgpo-1.parquet")]):
        path = artifacts / "rewards/sgpo-1.parquet"
        write_table(read_table(path, REWARDS).assign(detail="again"), path, REWARDS)
    assert "older than its inputs" in banners()[0]


def test_parameters_of_another_version_are_refused_in_one_line(content: dict[str, Any]) -> None:
    lock = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    for entry in lock.values():
        if "policy" in entry["params"]["params.yaml"]:
            entry["params"]["params.yaml"]["policy"] = {"kind": "unknown"}
    write_lock(lock)
    with pytest.raises(ArtifactError, match=r"^dvc\.lock: must hold parameters that this version"):
        find_completed_run()
