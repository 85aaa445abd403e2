"""The pages against the code: rules, chains, parameters, examples, names and links."""

import re
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import combinations
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from benchmarks import demo, first_run, pages, scaling_training
from benchmarks.demo import RESULTS
from benchmarks.pages import CLAIMS, TABLES, results_of
from benchmarks.scale.inputs import read_inputs
from benchmarks.scale.results import work_out
from benchmarks.scale.tables import all_tables, compiling_claims
from grpo.modalities import all_modalities
from grpo.objective.base import Objective, assign_credit, chain, loss_terms, scalar_loss
from grpo.objective.link import Link
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.objective.rules import RULES
from grpo.objective.trust import clip_surrogate, trusted_ranges
from grpo.objective.weight import average_over_steps
from grpo.params.parameters import (
    LinkSpec,
    Parameters,
    Reward,
    Training,
    with_tuples,
)
from grpo.params.yaml import parse_yaml
from grpo.rewards.base import Task
from grpo.runtime.artifacts.files import sha256_of
from grpo.runtime.artifacts.tables import PROMPTS, validate
from grpo.sampling.judging import judge_text
from grpo.schema import Machine
from grpo.tasks import find_task, task_kinds
from grpo.tasks.base import TaskInputs
from grpo.training.metrics import UpdateMetrics
from grpo.types import Credit, Rollouts
from grpo.wiring.allocation import build_curriculum, build_selection
from grpo.wiring.objectives import build_objective
from tests.objective import pairs
from tests.objective.every_link import EVERY, make
from tests.objective.test_trl_agreement import TRL_SCORE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKED = [*PAGES, *ROOT.glob("README.md")]
PIPELINE = DOCS / "pipeline.md"
METHODS = sorted((DOCS / "methods").glob("*.md"))
TO_BE_WRITTEN = {  # by the reader
    *(f"plugins/{name}.py" for name in ("closeness", "equations", "links", "rewards", "sums")),
    *("plugins/NAME.py", "plugins/shortness.py"),
}
POLICIES, DRAWS = (
    reduce(or_, (getattr(each, name) for each in all_modalities().values()))
    for name in ("policy", "sampling")
)
SECTIONS: dict[str, Any] = {
    "task": reduce(or_, (find_task(each) for each in task_kinds())),
    "policy": POLICIES,
    "reward": Reward,
    "training": Training,
    "machine": Machine,
    "sampling": reduce(or_, (each.sampling for each in all_modalities().values()))
    | Parameters.model_fields["sampling"].annotation,  # of an arm, or of all
}
PAIR = Rollouts(
    group=torch.tensor([0, 0]),
    reward=torch.tensor([1.0, 0.0]),
    outcome=torch.tensor([1.0, 0.0]),
    mask=torch.tensor([[True, True], [True, False]]),
    behavior_logp=torch.full((2, 2), -0.5),
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    """Returns the fenced blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.M | re.S)


def sections(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the top-level key and value of each YAML block of a page."""
    for block in blocks(path, "yaml"):
        yield from parse_yaml(block).items()


def chains(path: Path) -> list[Objective]:
    """Returns every objective of a page, as params.yaml would build it."""
    return [
        build_objective(TypeAdapter(list[LinkSpec]).validate_python(value, strict=True), "docs")
        for key, value in sections(path)
        if key == "objective"
    ]


def test_the_loss_of_trl_is_the_one_that_is_compared_with_it():
    (shown,) = chains(DOCS / "from-trl.md")
    compared = chain(TRL_SCORE, average_over_steps(), clip_surrogate(0.2, 0.2))
    assert shown.links == compared.links


def write_plugins(path: Path) -> None:
    """Writes the files under plugins/ that a page shows."""
    Path("plugins").mkdir()
    found = re.findall(
        r"`plugins/(\w+)\.py`:\n\n```python\n(.*?)^```$", path.read_text(), re.M | re.S
    )
    for name, text in found:
        Path(f"plugins/{name}.py").write_text(text)


def rows(path: Path) -> list[list[str]]:
    """Returns the cells of every table row of a page."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]


def defined_in(path: Path) -> dict[str, Any]:
    """Runs the Python blocks of a page in order and returns their definitions."""
    names: dict[str, Any] = {}
    for block in blocks(path, "python"):
        exec(compile(block, name_of(path), "exec"), names)
    return names


def test_the_table_of_rules_is_that_of_the_code():
    ids = {rule.id for rule in RULES}
    written = [row for row in rows(DOCS / "rules.md") if row[0] in ids]
    assert written == [[rule.id, rule.severity.name, rule.sentence] for rule in RULES]


def test_the_table_of_columns_has_every_column_of_updates_in_order():
    page = (DOCS / "pipeline.md").read_text().partition("## Columns of updates.csv")[2]
    cells = re.findall(r"^\| (`.*?) \|", page.partition("\n## ")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(cells)) == [*UpdateMetrics.__dataclass_fields__]


def test_the_table_of_pairs_is_what_the_rules_find():
    assert pairs.table() in (DOCS / "rules.md").read_text()


def test_rloo_has_no_z_score_to_break():
    found = {
        frozenset(names): {rule.id for rule in pairs.broken(plan)} & {"U16", "U18"}
        for names in combinations(pairs.METHODS, 2)
        for plan in [
            pairs.plan_of(*(pairs.METHODS[each] for each in names), advantage=pairs.LEAVE_ONE_OUT)
        ]
    }
    sized = ("sGPO", "signal per cost", "Knapsack RL")
    assert {names: rules for names, rules in found.items() if rules} == {
        **{frozenset({each, "PODS"}): {"U18"} for each in sized},
        **{
            frozenset({each, "judges normalized in groups"}): {"U16"}  # its own z-score
            for each in ("2-GRPO", *sized)
        },
    }


def test_the_rule_at_run_time_is_quoted_from_the_code():
    page, code = (
        (ROOT / each).read_text() for each in ("docs/rules.md", "grpo/training/frozen.py")
    )
    for objective in EVERY.values():
        for region in trusted_ranges(objective):
            assert f"`{region}`" in page
    assert "U27: clip_surrogate needs a range above 3 times the drift between" in page
    assert "U27: {name} needs a range above {MIN_CLIP_PER_DRIFT:g} times the drift" in code
    assert "MIN_CLIP_PER_DRIFT = 3.0" in code


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_yaml_blocks_are_sections_of_params_that_build(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_plugins(path)
    chains(path)
    has_sizes = False  # set by the selection above a curriculum
    for key, value in sections(path):
        assert key in {"objective", "curriculum", "selection", *SECTIONS}
        if key == "curriculum":
            specs = TypeAdapter(list[LinkSpec]).validate_python(value, strict=True)
            build_curriculum(specs, "x", has_sizes=has_sizes)
        elif key == "selection":
            specs = TypeAdapter(list[LinkSpec]).validate_python(value, strict=True)
            has_sizes = bool(build_selection(specs, "x").sizes)
        elif key in SECTIONS:
            TypeAdapter(SECTIONS[key]).validate_python(with_tuples(value), strict=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page_that_spells_out_its_chain(name: str):
    named, spelled = chains(DOCS / "methods" / f"{name}.md")
    denoising = ("flow_grpo", "flash_grpo", "awm", "diffusion_nft")
    dimensions = {each: {"dimensions": 512} for each in denoising}
    chunks = {"chunk_grpo": {"tokens": 32}, "pcm": {"tokens": 32, "budget": 2}}
    needed = {"dr_grpo": {"horizon": 24}, **dimensions, **chunks}
    defaults = ALGORITHMS[name](**needed.get(name, {}))
    assert named.links == defaults.links == spelled.links


@pytest.mark.parametrize("path", METHODS, ids=name_of)
def test_method_pages_have_the_same_headings(path: Path):
    headings = re.findall(r"^## (.*)$", path.read_text(), flags=re.M)
    for heading in ("Defaults", "Deviations from the paper", "Rules", "What was measured here"):
        assert heading in headings


def test_every_stage_stands_on_the_pipeline_page_with_its_parameters():
    table = [row for row in rows(PIPELINE) if len(row) == 4]
    written = {row[0].strip("`"): re.findall(r"`([^`]+)`", row[2]) for row in table}
    for name, stage in parse_yaml((ROOT / "dvc.yaml").read_text())["stages"].items():
        each = "ARM" if stage.get("foreach") == "${arms}" else "ROUND"
        title = f"{name}@{each}" if "foreach" in stage else name
        params = " ".join(stage.get("do", stage).get("params", []))
        params = params.replace("${item.arm}", "ARM").replace("${key}", each)
        assert written[title] == params.split()


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_relative_links_resolve(path: Path):
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", path.read_text())
    for target in targets:
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (path.parent / target).exists(), target


def test_the_index_leads_to_every_page():
    index = (DOCS / "index.md").read_text()
    for path in PAGES:
        if path.name != "index.md":
            assert f"({path.relative_to(DOCS).as_posix()})" in index


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_named_tests_and_files_exist(path: Path):
    text = path.read_text()
    written = "\n".join(each.read_text() for each in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in written, name
    for name in re.findall(r"`((?:grpo|stages|flows|tests|recipes)/[\w/]+\.(?:py|yaml))`", text):
        assert name in TO_BE_WRITTEN or (ROOT / name).is_file(), name


def reads_the_loss(objective: Objective) -> bool:
    """Returns whether a link is a loss link: credit links return the terms unchanged."""
    terms: Any = object()
    try:
        return objective.loss(terms) is not terms
    except AttributeError:
        return True


def test_the_table_of_links_lists_each_link_in_its_half():
    written = [(row[0], re.findall(r"`(\w+)`", row[2])) for row in rows(DOCS / "objective.md")]
    half_by_name = {name: half for half, names in written for name in names if name in LINKS}
    assert half_by_name == {
        name: "loss" if reads_the_loss(make(link)) else "credit" for name, link in LINKS.items()
    }


def test_the_table_of_algorithms_names_each_algorithm():
    found = [re.match(r"\[`(\w+)`\]", row[0]) for row in rows(DOCS / "objective.md")]
    assert sorted(each[1] for each in found if each) == sorted(ALGORITHMS)


def test_the_library_example_does_what_the_page_says():
    shown = defined_in(DOCS / "objective.md")
    credit = shown["credit"]
    assert credit.advantage[:, 0].tolist() == [1, -1, 0, 0]
    assert (credit.weight[2:] == 0).all()
    torch.testing.assert_close(shown["logp"].grad, -credit.weight * credit.advantage)


def test_the_ten_lines_of_the_tutorial_give_the_gradient_that_it_states():
    shown = defined_in(DOCS / "tutorial.md")
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0])
    torch.testing.assert_close(shown["credit"].advantage[:, 0], expected)
    assert (shown["credit"].weight[2:] == 0).all()
    torch.testing.assert_close(shown["logp"].grad[:, 0], -expected / 4)


def test_the_change_of_the_tutorial_fits_the_default_parameters():
    (change,) = blocks(DOCS / "tutorial.md", "diff")
    (before,) = re.findall(r"^-(.*)$", change.split("@@")[1], flags=re.M)
    assert (ROOT / "params.yaml").read_text().count(before) == 1


def test_the_loop_of_the_page_learns_with_a_chain_of_its_own():
    shown = defined_in(DOCS / "objective.md")
    assert shown["own"].init() != {}
    assert float(shown["train"](0)[2]) == pytest.approx(1 / 3)
    assert float(shown["train"](60)[2]) > 0.9


def test_the_credit_link_of_the_page_works():
    shown = defined_in(DOCS / "own-link.md")
    objective = shown["objective"]
    assert objective.links[-1] == Link("scale_failures", {"factor": 0.5})
    credit, _ = assign_credit(objective, PAIR, objective.init(), torch.Generator())
    assert credit.advantage.tolist() == [[1, 1], [-0.5, 0]]


def test_the_loss_link_of_the_page_has_the_gradient_of_reinforce_on_policy():
    link = defined_in(DOCS / "own-link.md")["clip_weight"](ratio_max=5.0)
    logp = PAIR.behavior_logp.clone().requires_grad_()
    credit = Credit(advantage=torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), weight=PAIR.mask.float())
    terms = loss_terms(
        link, logp=logp, proximal_logp=PAIR.behavior_logp, reference_logp=None, credit=credit
    )
    scalar_loss(terms, credit).backward()
    torch.testing.assert_close(logp.grad, -credit.advantage)


def test_the_task_of_the_page_keeps_the_schema_and_is_disjoint():
    sums = defined_in(DOCS / "own-task.md")["SumsTask"]
    task = sums(kind="sums", largest=9, train_prompts=40, eval_prompts=20)
    inputs = TaskInputs(seed=0, data=Path("data"), warmup=None, takes_messages=False)
    tables = task.make_prompts(inputs)
    for frame, count in [(tables.train, 40), (tables.eval, 20)]:
        assert len(validate(frame, PROMPTS, Path("prompts.parquet"))) == count
    assert set(tables.train["prompt"]).isdisjoint(tables.eval["prompt"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("#7", (1.0, "scored")), ("#5", (0.8, "scored")), ("#seven", (0.0, "unparsable"))],
)
def test_the_judge_of_the_page_scores(text: str, expected: tuple[float, str]):
    judge = defined_in(DOCS / "own-reward.md")["score_closeness"]
    task = Task(family="sums", prompt="3+4=", answer="7", entry={})
    outcome = judge_text(judge, text, task, answer_pattern="#([^#]*)", timeout_seconds=5.0)
    assert outcome[:2] == expected


def test_the_judge_of_parts_of_the_page_scores_each_equation():
    judge = defined_in(DOCS / "own-reward.md")["score_equations"]
    task = Task(family="sums", prompt="3+4=", answer="7", entry={})
    outcome = judge_text(
        judge,
        "3+4=7, 7+1=9",
        task,
        answer_pattern=None,
        timeout_seconds=5.0,
        scores_parts=True,
    )
    assert outcome == (0.5, "scored", "", ((5, 1.0), (12, 0.0)))


@pytest.mark.parametrize(("name", "table", "page"), TABLES)
def test_a_table_of_a_page_is_that_of_the_committed_file(
    name: str, table: Callable[[dict[str, Any]], str], page: str
):
    assert table(results_of(name)) in (DOCS / f"{page}.md").read_text()


def test_of_two_tables_with_equal_titles_each_goes_to_its_own_place():
    page = "a\n\n| t |\n|---|\n| 1 |\n\nb\n\n| t | u |\n| t |\n\n| t |\n|---|\n| 2 |\n"
    tables = ["| t |\n|---|\n| 3 |", "| t |\n|---|\n| 4 |"]
    after = pages.replace_tables(page, tables)
    assert after == page.replace("| 1 |", "| 3 |").replace("| 2 |", "| 4 |")
    with pytest.raises(ValueError, match="titles"):
        pages.replace_tables(page, [*tables, tables[0]])


@pytest.mark.parametrize(("name", "claims", "page"), CLAIMS)
def test_numbers_in_the_text_of_a_page_follow_from_the_committed_file(
    name: str, claims: Callable[[dict[str, Any]], list[str]], page: str
):
    text = " ".join((DOCS / f"{page}.md").read_text().split())
    assert [each for each in claims(results_of(name)) if each not in text] == []


OLD = {
    "same_bytes",  # compares two revisions
    "peer_trl_run_tuning",  # does not name its own; no page has a number of it
}
# A lent device has no git: its files have a digest of the code instead of a commit.
DIGITS_BY_KEY = {"revision": 40, "code": 12}


def revisions_in(found: Any) -> set[str]:
    """Returns the commits, and the digests of code, below any such key."""
    if not isinstance(found, dict | list):
        return set()
    own, below = set[str](), found
    if isinstance(found, dict):
        own = {
            text
            for key, digits in DIGITS_BY_KEY.items()
            if isinstance(text := found.get(key), str)
            and re.fullmatch(f"[0-9a-f]{{{digits}}}", text)
        }
        below = found.values()
    return own.union(*map(revisions_in, below))


def test_the_numbers_of_a_file_are_of_one_revision():
    """No page has a number of the files that do not name exactly one."""
    names = {str(path.relative_to(RESULTS).with_suffix("")) for path in RESULTS.rglob("*.json")}
    found = {name: len(revisions_in(results_of(name))) for name in names}
    assert {name for name, number in found.items() if number != 1} == OLD
    assert OLD.isdisjoint(name for name, _, _ in [*TABLES, *CLAIMS])


def test_what_was_measured_in_more_processes_came_to_the_same():
    assert results_of("rollout_throughput")["same_bytes"]
    assert results_of("scaling_sampling")["same_bytes"]
    assert scaling_training.losses_agree(results_of("scaling_training"))


def test_the_tables_of_scale_follow_from_the_committed_measurements():
    results = results_of("scale")
    inputs, page = read_inputs(), (DOCS / "scale.md").read_text()
    anew = work_out(inputs, results["measured"], results["savings"])
    tables = all_tables(inputs, {**results, "worked_out": anew})
    assert tables == all_tables(inputs, results)
    for each in tables:
        assert each in page
    text = " ".join(page.split())
    for each in compiling_claims(inputs, results):
        assert each in text


@pytest.mark.parametrize(
    ("output", "page"), [("advice", "advice"), ("left_out", "audits"), ("summary", "tutorial")]
)
def test_printed_outputs_on_pages_are_the_committed_files(output: str, page: str):
    printed = (RESULTS / f"{output}.txt").read_text()
    assert f"```text\n{printed}```" in (DOCS / f"{page}.md").read_text()


def test_what_pages_say_of_the_default_run_follows_from_its_file():
    of_arms, reached, above, seconds = demo.claims(results_of("demo"))
    said = {
        "README.md": [of_arms, reached, above, seconds],
        "docs/results.md": [of_arms, reached, above],
        "docs/tutorial.md": [seconds],
    }
    for page, claims in said.items():
        text = " ".join((ROOT / page).read_text().split())
        assert [each for each in claims if each not in text] == [], page


def test_the_readme_says_where_the_arms_of_its_picture_end():
    rows = (RESULTS / "summary.txt").read_text().splitlines()
    ends = {row.split()[0]: row.split()[3] for row in rows if " mean@8 " in row[:20]}
    said = f"`composed` ends at {ends['composed']} and `plain` at {ends['plain']}"
    assert said in (ROOT / "README.md").read_text()
    assert "composed took" in " ".join(rows)
    assert "never reached plain's final mean@8." in " ".join(rows)  # the last sentence, of composed


def test_the_picture_of_the_readme_is_that_of_the_first_run():
    assert sha256_of(first_run.PICTURE) == results_of("first_run")["picture_sha256"]
