"""Parts of a user under plugins/: how they are found, refused, and tracked."""

import asyncio
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from grpo.errors import AbsentError, ArtifactError, GrpoError, ParameterError
from grpo.params.manifests import Part, describe_plugins
from grpo.params.parameters import read_params
from grpo.params.recorded import unchanged
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.rewards import find_judge
from grpo.rewards._reward_functions import judge_of_function
from grpo.rewards.base import JudgeInputs, Task
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.plugins import import_plugin, plugin_files
from grpo.sampling.judging import JointJudge
from grpo.schema import DATA, PARAMS, Machine
from grpo.wiring.checks import findings
from grpo.wiring.memory import draw_prompts
from grpo.wiring.tasks import build_prompts
from stages import check

ROOT = Path(__file__).parents[1]
STAGES = parse_yaml((ROOT / "dvc.yaml").read_text())["stages"]
PARTS: tuple[Part, ...] = get_args(Part)
FILES: dict[str, Part] = {
    "plugins/closeness.py": "judge",
    "plugins/sums.py": "task",
    "plugins/steps.py": "allocation",
    "plugins/links.py": "link",
}
JUDGE = """
from plugins.common import scale

def closeness(completions, answer, **columns):
    return [scale(len(text) == len(right)) for text, right in zip(completions, answer)]
"""
TASK = """
import pandas as pd
from grpo.schema import Positive
from grpo.tasks.base import PromptTables, Task

class Sums(Task):
    prompt_kinds = ("text",)
    train_prompts: Positive

    def make_prompts(self, inputs):
        rows = [
            {"prompt_id": f"{n}", "family": "sums", "prompt": f"{n}+{n}=", "answer": str(2 * n),
             "entry": "{}"}
            for n in range(self.train_prompts + 2)
        ]
        warmup = [{"prompt_id": "a", "family": "sums", "prompt": "a=", "solution": "#a"}]
        return PromptTables(pd.DataFrame(rows[2:]), pd.DataFrame(rows[:2]), pd.DataFrame(warmup))
"""
STEP = '''
from grpo.allocation.selection import Selection, visit_prompts

def visit_few(prompts: int) -> Selection:
    """Visits so many prompts in every iteration."""
    return visit_prompts(prompts=prompts)
'''
LINK = '''
from dataclasses import replace

from grpo import Link, Objective, credit_link

def halve(factor: float = 0.5) -> Objective:
    """Multiplies advantages by `factor`, which has no unit."""
    def credit(before, rollouts, generator):
        return replace(before, advantage=factor * before.advantage)
    return credit_link(Link("halve", {"factor": factor}), credit)
'''

MODALITY = """
from tests.bandit import Bandit, BanditParams

class OwnParams(BanditParams):
    kind: str

class Own(Bandit):
    kind = "plugins.bandits.Own"
    policy = OwnParams
"""


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes into a workspace with the smoke recipe and parts of one's own of every kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # restores sys.path
    (tmp_path / "plugins").mkdir()
    written = {
        **dict(zip(FILES, (JUDGE, TASK, STEP, LINK))),
        "plugins/common.py": "scale = float\n",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    write_params()
    return tmp_path


def write_params(**changes: Any) -> None:
    """Writes the smoke recipe with the parts, and with other values at dotted paths."""
    params = yaml.safe_load((ROOT / "recipes/smoke.yaml").read_text())
    params["task"] = {"kind": "plugins.sums", "train_prompts": 8}
    reward = params["reward"]
    reward["judges"][0]["judge"] = "plugins.closeness.closeness"
    reward |= {"answer_pattern": None, "timeout_seconds": None}
    arm = params["arms"]["sgpo"]
    arm["curriculum"] = [
        {"split_at_random": {"phases": 1, "prompts_per_phase": 8}},
        {"fix_group_size": {"rollouts": 4}},
    ]
    arm["selection"] = [{"plugins.steps.visit_few": {"prompts": 4}}]
    arm["objective"].append("plugins.links.halve")
    for path, value in changes.items():
        *folders, last = path.split("__")
        place: Any = params
        for each in folders:
            place = place[int(each) if each.isdigit() else each]
        place[last] = value
    PARAMS.write_text(dump_yaml(params))


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(GrpoError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_may_have_a_part_of_its_own_of_every_kind():
    params = read_params()
    assert findings(params) == []
    assert type(params.task).__name__ == "Sums"
    for name in ("plugins.closeness", "plugins.closeness.closeness"):
        assert find_judge(name).reads_together


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plugins.absent.judge", "plugins/absent.py is not there"),
        ("plugins.closeness.distance", "plugins/closeness.py defines no 'distance'"),
        ("plugins.", "must be plugins.FILE.NAME"),
        ("plugins.../closeness", "must be plugins.FILE.NAME"),
        ("plugins.broken", r"plugins/broken.py, line 2: cannot be imported, NameError: name 'x'"),
        ("plugins.wrong", r"plugins/wrong.py, line 1: cannot be imported, SyntaxError"),
        ("plugins.through", r"plugins/broken.py, line 2: cannot be imported, NameError"),
        ("plugins.leaves", r"plugins/leaves.py, line 1: cannot be imported, SystemExit: 3"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_in_one_line(name: str, message: str):
    Path("plugins/broken.py").write_text("import os\nx\n")
    Path("plugins/through.py").write_text("import plugins.broken\n")
    Path("plugins/wrong.py").write_text("def f(:\n")
    Path("plugins/leaves.py").write_text("raise SystemExit(3)\n")
    assert re.search(message, refused(lambda: import_plugin(name)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("reward__judges__0__judge", "plugins.common.scale", "must be a Judge or .* got a type"),
        ("reward__judges__0__judge", "plugins.common", "or with a function of its name, got a mod"),
        ("reward__judges__0__judge", "plugins.none.f", "plugins/none.py is not there"),
        ("task__kind", "plugins.common", "must be a subclass of Task"),
        ("arms__sgpo__selection", ["plugins.links.halve"], "must return a Selection, returns Obj"),
        ("arms__sgpo__objective", ["plugins.common.scale"], "must be a function that returns a Ob"),
        ("arms__sgpo__objective", ["plugins.links.bare"], "must have a docstring"),
        ("arms__sgpo__objective", [{"plugins.links.halve": {"by": 1}}], r"halve\.by is unknown"),
        ("arms__sgpo__objective", [{"plugins.links.halve": {"factor": "a"}}], r"halve\.factor mu"),
        ("policy__kind", "plugins.sums.Sums", "must be a subclass of Modality"),
    ],
)
def test_a_part_of_another_kind_is_refused_with_its_path(path: str, value: Any, message: str):
    text = Path("plugins/links.py").read_text()
    Path("plugins/links.py").write_text(text + "def bare() -> Objective:\n    return halve()\n")
    write_params(**{path: value})
    said = refused(lambda: findings(read_params()))
    assert said.startswith(f"{PARAMS}: {path.split('__')[0]}")
    assert re.search(message, said)


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ("factor: list[float]", "halve()", "factor must be annotated as int, float or str"),
        ("factor", "halve()", "factor must be annotated as int, float or str"),
        ("factor: Missing", "halve()", "wrong annotation, name 'Missing'"),
        ("factor: float", "{}['x']", "cannot be called, KeyError: 'x'; correct it"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_in_one_line(
    header: str, body: str, message: str
):
    text = "from __future__ import annotations\n" + Path("plugins/links.py").read_text()
    odd = f'def odd({header}) -> Objective:\n    """Is odd."""\n    return {body}\n'
    Path("plugins/links.py").write_text(f"{text}\n\n{odd}")
    write_params(arms__sgpo__objective=["rloo", {"plugins.links.odd": {"factor": 0.5}}])
    said = refused(lambda: findings(read_params()))
    assert said.startswith(f"{PARAMS}: arms.sgpo.objective[1].plugins.links.odd: ")
    assert message in said


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("credit", "None", "must return a Credit, returns NoneType"),
        ("credit", "batch.prompt", "AttributeError: 'Rollouts' object has no attribute 'prompt'"),
        (
            "credit",
            "replace(before, weight=before.weight[:, :1])",
            "must return a Credit whose weight has the shape [rollout, step], [8, 5] here, "
            "returns [8, 1]",
        ),
        (
            "credit",
            "replace(before, advantage=before.advantage / 0)",
            "must return a Credit whose advantage is finite, returns NaN or infinity",
        ),
        (
            "credit",
            "replace(before, advantage=before.advantage > 0)",
            "must return a Credit whose advantage is floats, returns torch.bool",
        ),
        ("loss", "before.loss", "must return StepTerms, returns Tensor"),
        (
            "loss",
            "before.with_loss(before.logp.sum(1, keepdim=True))",
            "a link's loss must have the shape [8, 5] of the log-probs, got [8, 1]",
        ),
        (
            "loss",
            "replace(before, loss=(before.logp * 0).log())",
            "must return StepTerms whose loss is finite, returns NaN or infinity",
        ),
    ],
)
def test_a_link_that_returns_the_wrong_thing_is_refused(kind: str, result: str, message: str):
    arguments = "before, batch, generator" if kind == "credit" else "before"
    Path("plugins/wrong.py").write_text(
        f"""
from dataclasses import replace
from grpo import Link, Objective, {kind}_link

def wrong() -> Objective:
    \"\"\"Returns the wrong thing.\"\"\"
    def apply({arguments}):
        return {result}
    return {kind}_link(Link("wrong", {{}}), apply)
"""
    )
    write_params(arms__sgpo__objective=["rloo", "plugins.wrong"])
    said = refused(lambda: findings(read_params()))
    assert said.startswith(f"{PARAMS}: arms.sgpo.objective[1].plugins.wrong: ")
    assert message in said


@pytest.mark.parametrize(
    "result",
    [
        "replace(before, loss=before.loss * before.clipped)",  # of the link before
        "replace(before, loss=before.loss / before.loss.abs().sum())",
        "before.with_loss(before.noise.std[:, 8:9] + before.loss)",  # a policy may have 9 steps
    ],
)
def test_a_link_is_tried_after_those_before_it_and_may_need_other_sizes(result: str):
    Path("plugins/right.py").write_text(
        f"""
from dataclasses import replace
from grpo import Link, Objective, loss_link

def right() -> Objective:
    \"\"\"Reads what earlier links give, or what a policy has.\"\"\"
    return loss_link(Link("right", {{}}), lambda before: {result})
"""
    )
    write_params(arms__sgpo__objective=["rloo", "plugins.right"])
    findings(read_params())


def test_a_link_with_state_that_returns_no_pair_is_named():
    Path("plugins/wrong.py").write_text(
        '''
from grpo import Link, Objective, stateful_credit_link

def wrong() -> Objective:
    """Returns no state."""
    return stateful_credit_link(Link("wrong", {}), {"seen": 0.0}, lambda c, r, s, g: None)
'''
    )
    write_params(arms__sgpo__objective=["rloo", "plugins.wrong"])
    said = refused(lambda: findings(read_params()))
    assert said.startswith(
        f"{PARAMS}: arms.sgpo.objective[1].plugins.wrong: fails on a small batch"
    )


def test_an_unknown_key_is_never_a_part():
    Path("plugins/rewards.py").write_text("")
    write_params(rewards=4)
    assert refused(read_params).endswith("rewards is unknown, got 4; is it reward?")


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        ("reward__judges__0__judge", "closeness", "plugins.closeness"),
        ("arms__sgpo__objective", ["rloo", "links"], "plugins.links"),
    ],
)
def test_a_part_without_its_folder_has_a_hint(path: str, value: Any, meant: str):
    write_params(**{path: value})
    assert refused(lambda: findings(read_params())).endswith(f"; is it {meant}?")


def test_annotations_of_a_function_may_be_strings():
    text = Path("plugins/links.py").read_text()
    Path("plugins/links.py").write_text(f"from __future__ import annotations\n{text}")
    assert findings(read_params()) == []


def test_a_modality_of_ones_own_is_found():
    Path("plugins/bandits.py").write_text(MODALITY)
    write_params(
        policy={
            "kind": "plugins.bandits.Own",
            "base": {"arms": 10, "spread": 1.0},
            "lora": None,
            "recompute": False,
        },
        evaluation__sampling={"temperature": 1.0},
    )
    assert type(read_params().modality).__name__ == "Own"


def test_rules_know_a_link_of_ones_own_by_its_kinds():
    text = Path("plugins/links.py").read_text()
    Path("plugins/links.py").write_text(text.replace("factor})", 'factor}, "scale")'))
    assert {each.rule for each in findings(read_params())} == {"U21"}  # after rloo's selection


def test_prompts_of_ones_own_get_the_names_of_their_parts_and_must_be_held_out():
    tables = build_prompts(read_params(), DATA)
    assert {each.split("-")[0] for each in tables.train["prompt_id"]} == {"train"}
    assert tables.eval["prompt_id"].tolist() == ["eval-0", "eval-1"]
    text = Path("plugins/sums.py").read_text()
    Path("plugins/sums.py").write_text(text.replace("rows[2:]", "rows[1:]") + "# in both\n")
    sys.modules.pop("plugins.sums")
    said = refused(lambda: build_prompts(read_params(), DATA))
    assert "must evaluate on other prompts than it trains on, '1+1='" in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('prompt_kinds = ("text",)', "", "prompt_kinds must be a tuple of some of"),
        ('prompt_kinds = ("text",)', 'prompt_kinds = ("words",)', r"got \('words',\)"),
        ("def make_prompts(", "def prompts(", "must define make_prompts"),
        ("rows = [", "rows = {}['a'] + [", r"plugins/sums\.py, line \d+: .*KeyError: 'a'; correct"),
        ("rows = [", "raise ValueError('none today') or [", "task: none today"),
        (
            "return PromptTables(",
            "return list((",
            "make_prompts must return PromptTables, returns l",
        ),
        (
            '"entry": "{}"',
            '"entries": "{}"',
            "train of make_prompts must be a table .* column entry",
        ),
        ("rows[2:]), pd", "rows[2:]).to_dict(), pd", "train of make_prompts must be a table"),
        ('"entry": "{}"', '"entry": {}', r"must have texts in the column entry, has \{\}"),
        ("rows[2:]", "rows[3:]", "must return 8 prompts for train, returns 7; widen"),
        ("rows[:2]), pd", "rows).head(0), pd", "must return 1 prompts for eval, returns 0"),
    ],
)
def test_a_task_that_cannot_make_prompts_is_refused_in_one_line(old: str, new: str, message: str):
    text = Path("plugins/sums.py").read_text()
    assert old in text
    tail = "))" if "list((" in new else ")"
    changed = text.replace(old, new).replace("pd.DataFrame(warmup))", f"pd.DataFrame(warmup){tail}")
    Path("plugins/sums.py").write_text(changed)
    said = refused(lambda: build_prompts(read_params(), Path()))
    assert re.search(message, said)


def test_a_task_names_its_argument_as_it_likes():
    text = Path("plugins/sums.py").read_text()
    Path("plugins/sums.py").write_text(text.replace("self, inputs", "self, given"))
    build_prompts(read_params(), Path())


def test_a_task_need_not_make_solutions_if_no_base_is_warmed_up():
    text = Path("plugins/sums.py").read_text()
    Path("plugins/sums.py").write_text(text.replace("pd.DataFrame(warmup)", "pd.DataFrame()"))
    assert draw_prompts(read_params(), DATA)
    said = refused(lambda: build_prompts(read_params(), DATA))  # its base is warmed up
    assert "warmup of make_prompts must be a table with a column prompt_id" in said


def test_what_a_task_lacks_on_this_machine_is_told_from_what_is_wrong():
    text = Path("plugins/sums.py").read_text()
    Path("plugins/sums.py").write_text(text.replace("rows = [", "rows = open('none').read() or ["))
    with pytest.raises(AbsentError, match=r"plugins/sums\.py, line \d+: .*FileNotFoundError"):
        build_prompts(read_params(), Path())


def test_every_workspace_has_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = import_plugin("plugins.common")
    import_plugin("plugins.links")
    assert import_plugin("plugins.common") is first
    other = tmp_path / "other"
    (other / "plugins").mkdir(parents=True)
    (other / "plugins/common.py").write_text("scale = int\n")
    monkeypatch.chdir(other)
    assert import_plugin("plugins.common").scale is int


# What is tracked.


def described() -> dict[Part, dict[str, str]]:
    params = read_params()
    return {part: describe_plugins(params, part) for part in PARTS}


def test_a_part_depends_on_the_files_that_it_imports_in_turn():
    Path("plugins/more").mkdir()
    Path("plugins/more/__init__.py").write_text("")
    Path("plugins/more/a.py").write_text("from .b import x\nfrom plugins import common\n")
    Path("plugins/more/b.py").write_text("def x():\n    import plugins.links\n")
    names = ("common", "links", "more/__init__", "more/a", "more/b")
    assert plugin_files("plugins.more.a") == [Path(f"plugins/{each}.py") for each in names]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_changes_the_manifest_of_its_kind_alone(name: str):
    before = described()
    assert [part for part in PARTS if name in before[part]] == [FILES[name]]
    Path(name).write_text(Path(name).read_text() + "\n")
    after = described()
    assert [part for part in PARTS if after[part] != before[part]] == [FILES[name]]


def test_a_file_that_no_parameter_names_changes_no_manifest():
    before = described()
    Path("plugins/unused.py").write_text("x = 1\n")
    Path("plugins/README.md").write_text("mine")
    assert described() == before
    assert "plugins/common.py" in before["judge"]  # imported by the judge


def stages_that_depend(on: str) -> set[str]:
    return {name for name, each in STAGES.items() if on in each.get("do", each)["deps"]}


def test_stages_depend_on_the_parts_that_they_run():
    """They run those of a kind if they import the library's of that kind."""
    assert stages_that_depend("plugins") == {"check", "lineage"}
    assert stages_that_depend("artifacts/plugins/task.json") == {"prepare"}
    everything = {"check", "lineage"}
    for part, code in {
        "judge": "grpo/rewards",
        "allocation": "grpo/wiring/allocation.py",
        "modality": "grpo/modalities/modality.py",
    }.items():
        runs = (
            stages_that_depend(code) - everything - ({"prepare"} if part == "modality" else set())
        )
        assert stages_that_depend(f"artifacts/plugins/{part}.json") == runs, part
    runs = stages_that_depend("grpo/objective/links.py") | stages_that_depend("grpo/objective")
    assert stages_that_depend("artifacts/plugins/link.json") == runs - everything


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_stage_refuses_a_part_that_has_changed_since_check(when: str):
    Path("dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    outs = (Path("needed.json"), Path("artifacts/data"), Path("artifacts/plugins"))
    check.main(Usage(), PARAMS, DATA, *outs)
    with unchanged("score@sgpo-1"):
        pass

    def change() -> None:
        Path("plugins/common.py").write_text("scale = int\n")

    if when == "before":
        change()
    said = r"^plugins/common\.py: has changed since check ran"
    with pytest.raises(ArtifactError, match=said), unchanged("score@sgpo-1"):
        change()
    with unchanged("base"):  # reads no judge
        pass


# Reward functions as TRL has them.

TASKS = [
    Task(family="sums", prompt="1+1=", answer="2", entry={"level": 1}),
    Task(family="sums", prompt="2+2=", answer="4", entry={"level": 2, "hint": "even"}),
]
TEXTS = ["2", "5"]
INPUTS = JudgeInputs(
    where="here",
    model=None,
    data=DATA,
    machine=Machine(device="cpu", dtype="float32", threads=1, compile=False),
    takes_messages=False,
)


def read(function: Callable[..., Any], *, takes_messages: bool = False) -> list[Any]:
    inputs = replace(INPUTS, takes_messages=takes_messages)
    reader: Any = judge_of_function("plugins.f", function).load(inputs)
    return [each.score for each in reader(TEXTS, TASKS)]


def test_a_function_gets_the_columns_that_it_names_and_all_with_a_variadic():
    seen: list[dict[str, Any]] = []

    def few(completions: list[str], level: list[int]) -> list[float]:
        return [float(each) for each in level]

    def everything(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        return [0.0, 1.0]

    assert read(few) == [1.0, 2.0]
    assert read(everything) == [0.0, 1.0]
    assert seen == [
        {
            "prompts": ["1+1=", "2+2="],
            "completions": TEXTS,
            "answer": ["2", "4"],
            "family": ["sums", "sums"],
            "level": [1, 2],
            "hint": [None, "even"],
        }
    ]

    def optional(
        completions: list[str], hint: Any = "x", other: Any = "y", **kw: Any
    ) -> list[float]:
        return [float(a is None) + float(b is None) for a, b in zip(hint, other)]

    assert read(optional) == [2.0, 1.0]  # whatever prompts are in a call
    assert judge_of_function("plugins.f", few).needs_columns == {"level"}
    assert judge_of_function("plugins.f", everything).needs_columns == frozenset()


def test_an_async_function_is_awaited():
    async def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return list(await asyncio.gather(*(slowly(each) for each in completions)))

    async def slowly(text: str) -> float:
        await asyncio.sleep(0.01)
        return float(text)

    assert read(reward) == [2.0, 5.0]


def test_a_wrong_number_of_rewards_fails_all_rollouts_of_a_call():
    """Judged alone, each text would get a reward of this function, which hides the fault."""

    def reward(completions: list[str]) -> list[float]:
        return [0.9] * max(len(completions) - 1, 1)

    loaded: Any = judge_of_function("plugins.f", reward).load(INPUTS)
    judge = JointJudge(view=loaded, reads_media=False)
    found = [outcome for _, outcome in judge.judge(TEXTS, TASKS)]
    assert [each.status for each in found] == ["failed", "failed"]
    assert {each.detail for each in found} == {"must return 2 rewards, returned 1"}


def test_a_chat_gets_messages():
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert prompts[0] == [{"role": "user", "content": "1+1="}]
        return [float(each[0]["content"]) for each in completions]

    assert read(reward, takes_messages=True) == [2.0, 5.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda answer, task: 1.0, "got <lambda|must be a function"),
        (lambda completions, /: [1.0], "must be a function"),
        (lambda prompts, completions, completion_ids: [1.0], "needs completion_ids, which only"),
        (lambda prompts, completions, trainer_state, **kw: [1.0], "needs trainer_state, which"),
    ],
)
def test_a_function_of_another_convention_is_refused(function: Callable[..., Any], message: str):
    with pytest.raises(ParameterError, match=message):
        judge_of_function("plugins.f", function)
