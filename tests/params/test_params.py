"""params.yaml and every recipe: parsed, sound, and refused in one line when wrong."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.workspaces import SHORT_ROLLOUTS
from grpo import __main__ as commands
from grpo.errors import ParameterError
from grpo.objective.links import ALGORITHMS, LINKS
from grpo.objective.rules import Severity
from grpo.params.parameters import read_params
from grpo.params.recipes import read_content
from grpo.params.yaml import dump_yaml
from grpo.wiring.allocation import curriculum_of
from grpo.wiring.checks import findings, remarks_on_revisions
from grpo.wiring.objectives import build_objective
from grpo.wiring.tasks import build_prompts
from tests.objective.every_link import make

ROOT = Path(__file__).parents[2]
S3 = {"source": "s3", "uri": "s3://bucket/model", "sha256": "0" * 64}
HUB = {"source": "hub", "id": "a", "revision": "b"}
JUDGE = {"weight": 1.0, "normalize": "none", "model": None, "score_range": None}
PICKSCORE = {**JUDGE, "judge": "pickscore", "model": HUB, "score_range": [0, 26]}
FIRST = r"reward.judges\[0\]"
MODEL_REWARD = {
    "judges": [PICKSCORE],
    "answer_pattern": None,
    "threshold": 0.8,
    "maximize": "score",
    "unfinished_penalty": 0.0,
    "timeout_seconds": None,
}
GLYPHS = {
    "kind": "glyphs",
    "train_prompts": 1,
    "eval_prompts": 1,
    "families": {"a": ["AB"]},
    "pixels_per_frame": None,
}
TEXT_REWARD = {
    **MODEL_REWARD,
    "judges": [{**JUDGE, "judge": "math"}],
    "answer_pattern": "(.+)",
    "timeout_seconds": 5.0,
}
FILES = [ROOT / "params.yaml", *sorted((ROOT / "recipes").glob("*.yaml"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_recipe_parses_builds_and_is_sound(path: Path):
    params = read_params(path)
    for name, arm in params.arms.items():
        assert build_objective(arm.objective, name).links
        assert curriculum_of(params, name)
    assert [each for each in findings(params) if each.severity is Severity.ERROR] == []


@pytest.mark.parametrize("name", [*LINKS, *ALGORITHMS])
def test_a_link_is_named_after_its_function_and_keeps_all_its_settings(name: str):
    """What rules and reports read is what was built."""
    function = {**LINKS, **ALGORITHMS}[name]
    objective = make(function)
    assert function.__name__ == name
    if name in LINKS:
        (link,) = objective.links
        names = function.__annotations__.keys() - {"return"}
        assert (link.name, set(link.settings)) == (name, names)
    assert {link.name for link in objective.links} <= LINKS.keys()


def changed(tmp_path: Path, *changes: tuple[str, object], recipe: Path = SHORT_ROLLOUTS) -> Path:
    """Returns a copy of a parameter file with values changed by dotted path; None removes."""
    content = read_content(recipe)
    for path, value in changes:
        *parents, last = path.split(".")
        node = content
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if value is None:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
    target = tmp_path / "params.yaml"
    target.write_text(dump_yaml(content))
    return target


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", "zero", r"seed must be an integer, got 'zero'"),
        ("seed", None, r"seed is missing"),
        ("color", "red", r"color is unknown"),
        ("arms.sgpo.training.learning_rate", -0.1, r"arms.sgpo.training.learning_rate .*-0.1"),
        ("arms.sgpo.sampling.temperature", 0.0, r"arms.uniform.sampling.temperature"),
        (
            "arms.sgpo.sampling.temperature",
            {"first": 1.2, "last": 1.0},
            r"uniform.sampling.temperature.last must be at least 1.2, the first temperature, got 1",
        ),
        ("arms.sgpo.sampling.temperature", {}, r"uniform.sampling.temperature.first is missing"),
        ("task.kind", "poetry", r"task.kind .*poetry"),
        ("policy.base.warmup.updates", 1.5, r"policy.base.warmup.updates must be an integer"),
        ("rounds.sgpo-1.arm", "nobody", r"rounds.sgpo-1.arm must be one of .*'nobody'"),
        ("rounds.uniform-1.start", "uniform-2", r"rounds.uniform-1.start must be 'base' or"),
        ("rounds.base", {"arm": "sgpo", "start": "base", "phase": 1}, r"rounds.base"),
        ("evaluation.confidence", 1.0, r"evaluation.confidence must be less than 1"),
        (
            "reward.overlong_penalty",
            {"max_steps": 4, "buffer_steps": 5, "penalty": 1.0},
            r"reward.overlong_penalty must have at most as many buffer_steps as max_steps",
        ),
        (
            "reward.overlong_penalty",
            {"max_steps": 10**6, "buffer_steps": 5, "penalty": 1.0},
            r"reward.overlong_penalty.max_steps must be at most \d+, which is policy.max_steps",
        ),
        (
            "reward.overlong_penalty",
            {"max_steps": 4, "buffer_steps": 2, "penalty": 0.0},
            r"reward.overlong_penalty.penalty must be greater than 0",
        ),
    ],
)
def test_a_wrong_parameter_is_named_in_one_line(
    tmp_path: Path, path: str, value: object, message: str
):
    file = changed(tmp_path, (path, value))
    with pytest.raises(ParameterError, match=message) as raised:
        read_params(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert "\n" not in str(raised.value)


@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(["uniform", "sgpo"]), st.integers(0, 6)), min_size=1, max_size=6
    )
)
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_round_is_on_the_chain_of_its_arm_or_is_refused_by_name(
    tmp_path: Path, drawn: list[tuple[str, int]]
):
    """The page draws an arm's last chain: a round beside it would be paid for and not shown."""
    starts = ["base", *(f"r{i}" for i in range(len(drawn)))]
    rounds = {
        f"r{i}": {"arm": arm, "start": starts[min(start, i)], "phase": 1}
        for i, (arm, start) in enumerate(drawn)
    }
    file = changed(tmp_path, ("rounds", rounds))
    chains = {name: [name] for name in rounds}
    for name, each in rounds.items():
        chains[name] += chains.get(each["start"], [])
    whole = {each["arm"]: chains[name] for name, each in rounds.items()}  # by arm, of the last one
    lost = [name for name, each in rounds.items() if name not in whole[each["arm"]]]
    if not lost:
        params = read_params(file)
        assert all(name in params.chain(each.arm) for name, each in params.rounds.items())
        return
    with pytest.raises(
        ParameterError, match=r"rounds.r\d.start must be 'r\d', the previous round"
    ) as e:
        read_params(file)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("policy.kind", "tokens", r"policy"),
        ("policy.canvas.height", 0, r"policy.canvas.height must be greater than 0, got 0"),
        ("policy.base.transformer", None, r"policy.base.transformer is missing"),
        ("machine.compile", True, r"with policy.kind denoising, machine.compile must be false"),
        ("arms.flow.sampling.density", "ddpm", r"arms.flow.sampling.density must be .*'ddpm'"),
        ("arms.flow.sampling.window", [0], r"arms.flow.sampling.window"),
        ("arms.flow.sampling.window", [9, 12], r"flow.sampling window must hold a step"),
        ("arms.flash.sampling", {"temperature": 1.0, "top_p": 1.0, "rollouts_per_batch": 8},
         r"arms.flash.sampling.num_steps is missing"),
        ("evaluation.sampling", {"temperature": 1.0}, r"evaluation.sampling.num_steps is missing"),
        ("task", {"kind": "reasoning_gym", "notation": "compact", "train_prompts": 1,
                  "eval_prompts": 1, "instruction": "", "families": {"gcd": {}}},
         r"task.kind must be one of \['glyphs', 'jsonl'\] with policy.kind denoising, got 'reas"),
        ("reward", TEXT_REWARD,
         rf"{FIRST}.judge must be one of .*'pickscore'.* with policy.kind denoising, got 'math'"),
        ("reward.judges.0.judge", "math",
         r"reward.answer_pattern must be stated with judge math, got None"),
        ("reward.timeout_seconds", 5.0, r"reward.timeout_seconds must be null .* ocr, got 5.0"),
        ("reward.answer_pattern", "(.+)", r"reward.answer_pattern must be null .* ocr, got '"),
        ("reward.judges.0.model", HUB, rf"{FIRST}.model must be null with judge ocr, got {{'sourc"),
        ("reward.judges.0.judge", "clip", rf"{FIRST}.model must be stated with judge clip, got N"),
        ("reward.judges.0", {**PICKSCORE, "model": None},
         rf"{FIRST}.model must be stated with judge pickscore, got None"),
        ("reward.judges.0", {**PICKSCORE, "score_range": None},
         rf"{FIRST}.score_range must be stated with judge pickscore"),
        ("reward.judges.0", {**PICKSCORE, "score_range": [26, 26]},
         rf"{FIRST}.score_range must rise from its first number to its second, got \(26, 26\)"),
        ("reward.judges.0", {**PICKSCORE, "model": {"source": "hub", "id": "a"}},
         rf"{FIRST}.model.revision is missing"),
        ("reward.judges.0", {**PICKSCORE, "model": {"source": "gguf"}},
         rf"{FIRST}.model.source .*'gguf'"),
        ("reward.judges.0.weight", -1.0, rf"{FIRST}.weight must be at least 0.0, got -1.0"),
        ("reward.judges.0.weight", 0.0, r"reward.judges must have a weight above 0"),
        ("reward.judges.0.normalize", "softmax", rf"{FIRST}.normalize must be 'none', 'z_score"),
        ("reward.judges", [], r"reward.judges must have at least 1 item"),
        ("reward.judges", [{**JUDGE, "judge": "ocr"}] * 2,
         r"reward.judges must name each judge once, ocr is there twice"),
        ("evaluation.judges", [{"judge": "ocr", "model": None, "score_range": None}],
         r"evaluation.judges\[0\] must not repeat a judge of the reward, got 'ocr'; remove it"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_of_denoising_is_named_in_one_line(
    tmp_path: Path, path: str, value: object, message: str
):
    file = changed(tmp_path, (path, value), recipe=ROOT / "recipes" / "glyphs.yaml")
    with pytest.raises(ParameterError, match=message) as raised:
        read_params(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        ("smoke", "policy.base"),
        ("glyphs", "policy.base"),
        ("manipulation", "policy.base.backbone"),
        ("manipulation-pixels", "policy.base.vision.encoder"),
        ("images-sd35", "reward.judges.0.model"),
        ("reasoning-qwen", "task.directory"),
    ],
)
def test_what_is_in_s3_is_bound_to_its_digest(tmp_path: Path, recipe: str, path: str):
    recipe_file = ROOT / "recipes" / f"{recipe}.yaml"
    assert read_params(changed(tmp_path, (path, S3), recipe=recipe_file))
    for wrong, message in [
        ({"sha256": None}, r"sha256 must be a text, got null"),
        ({"sha256": "main"}, r"sha256 must be 64 digits .*, got 'main'"),
        ({"uri": "bucket/model"}, r"uri must be s3://BUCKET.*, got 'bucket/model'"),
    ]:
        file = changed(tmp_path, (path, {**S3, **wrong}), recipe=recipe_file)
        shown = re.sub(r"\.(\d)", r"\\[\1\\]", path)
        with pytest.raises(ParameterError, match=rf"^{file}: {shown}\.{message}$"):
            read_params(file)


def test_judges_of_media_and_your_own_prompts_go_with_denoising(tmp_path: Path):
    own = {
        "kind": "jsonl",
        "directory": None,
        "train": "a",
        "eval": "b",
        "columns": {},
        "instruction": "",
    }
    changes = (("reward", MODEL_REWARD), ("task", own))
    params = read_params(changed(tmp_path, *changes, recipe=ROOT / "recipes" / "glyphs.yaml"))
    assert params.reward.judges[0].score_range == (0, 26)
    with pytest.raises(
        ParameterError, match=r"scratch needs a task with solutions.* jsonl has none"
    ):
        build_prompts(params, tmp_path)
    with pytest.raises(ParameterError, match=r"task.kind must be one of .*\.kind tokens, got 'gl"):
        read_params(
            changed(tmp_path, ("task", GLYPHS), recipe=ROOT / "recipes/reasoning-qwen.yaml")
        )


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (["clip_everything"], r"arms.a.objective\[0\] must be one of"),
        ([{"rloo": {"lo": 0.1}}], r"arms.a.objective\[0\].rloo.lo is unknown"),
        (["rloo", {"penalize_kl": {}}], r"arms.a.objective\[1\].penalize_kl.beta is missing"),
        ([{"rloo": {"low": "a"}}], r"arms.a.objective\[0\].rloo.low must be a number, got 'a'"),
        ([{"rloo": {"low": -1.0}}], r"arms.a.objective\[0\].rloo: clip_surrogate needs"),
        ([{"rloo": {}, "gspo": {}}], r"arms.a.objective\[0\] must name one component"),
        ([{"cispo": {"ratio_max": 0.2}}], r"arms.a.objective\[0\].cispo: U13: truncate_ratio"),
        (["center_by_moving_average"] * 2, r"arms.a.objective: a link with state"),
    ],
)
def test_a_wrong_link_is_named_in_one_line(objective: list, message: str):
    with pytest.raises(ParameterError, match=message):
        build_objective(objective, "a")


@pytest.mark.parametrize(
    ("architecture", "routing", "expected"),
    [
        ("LlamaForCausalLM", "replay_sampled", [("U33", "ERROR", "policy.routing")]),
        ("Qwen3MoeForCausalLM", "replay_proximal", [("U33", "WARN", "policy.routing")]),
        ("Qwen3MoeForCausalLM", "replay_sampled", []),
        ("LlamaForCausalLM", "live", []),
    ],
)
def test_routing_is_checked_against_the_base(
    tmp_path: Path, architecture: str, routing: str, expected: list
):
    file = changed(
        tmp_path,
        ("policy.base.architecture", architecture),
        ("policy.routing", routing),
        *((f"arms.{arm}.training.updates_per_iteration", 4) for arm in ("uniform", "sgpo")),
    )
    found = {
        (each.rule, each.severity.name, each.path)
        for each in findings(read_params(file))
        if each.rule == "U33"
    }
    assert found == set(expected)


def test_compiled_passes_cannot_record_or_replay_routing(tmp_path: Path):
    replay = ("policy.routing", "replay_sampled")
    read_params(changed(tmp_path, ("machine.compile", False), replay))
    read_params(changed(tmp_path, ("machine.compile", True)))
    with pytest.raises(ParameterError, match="must be live, got 'replay_sampled'"):
        read_params(changed(tmp_path, ("machine.compile", True), replay))


def test_ranks_divide_token_policies_that_are_not_compiled(tmp_path: Path):
    ranks = ("arms.sgpo.training.ranks", 2)
    read_params(changed(tmp_path, ranks))
    for setting, what in [
        (("machine.compile", True), "machine.compile must be false"),
        (("policy.routing", "replay_proximal"), "policy.routing must not be replay_proximal"),
    ]:
        with pytest.raises(ParameterError, match=f"with arms.sgpo.training.ranks above 1, {what}"):
            read_params(changed(tmp_path, ranks, setting))
    for name, arm in (("glyphs", "flow"), ("manipulation", "all")):
        file = changed(
            tmp_path,
            (f"arms.{arm}.training.ranks", 2),
            recipe=ROOT / "recipes" / f"{name}.yaml",
        )
        with pytest.raises(ParameterError, match=r"ranks above 1, policy.kind must be tokens"):
            read_params(file)


def test_check_lists_every_violated_rule_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The acceptance file: unsound links in one arm, unsound settings around it."""
    file = changed(
        tmp_path,
        (
            "arms.sgpo.objective",
            [
                {"gspo": {}},
                {"clip_surrogate": {"low": 0.2, "high": 0.2}},
                {"penalize_kl": {"beta": 0.1, "estimator": "k1"}},
                {"drop_uniform_groups": {"by": "reward"}},
            ],
        ),
        ("arms.sgpo.sampling.top_p", 0.9),
        ("reward.unfinished_penalty", 0.5),
        ("policy.base.config.attention_dropout", 0.1),
        (
            "arms.sgpo.curriculum",
            [
                {"drop_trivial": {"above": 0.75}},
                {"keep_rate_window": {"low": 0.1, "high": 0.9}},
                {"size_groups_by_inverse_rate": {"smallest": 2, "largest": 8}},
                {"split_easy_to_hard": {"phases": 3}},
            ],
        ),
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["grpo", "check", str(file)])
    with pytest.raises(SystemExit, match=r"^2$"):
        commands.main()
    printed = capsys.readouterr().out
    for expected in [
        "U11 ERROR arms.sgpo.objective[1].clip_surrogate",
        "U16 ERROR arms.sgpo.objective[0].gspo",
        "U19 ERROR arms.sgpo.curriculum[1].keep_rate_window",
        "U20 ERROR arms.sgpo.objective[3].drop_uniform_groups",
        "U25 ERROR arms.sgpo.sampling.top_p",
        "U26 ERROR policy.base.config.attention_dropout",
        "U35 ERROR arms.sgpo.objective[2].penalize_kl",
        "U18 WARN arms.sgpo.objective[0].gspo",
        "U24 WARN arms.sgpo.objective[2].penalize_kl",
    ]:
        assert expected in printed


def test_a_hub_model_whose_revision_is_not_a_commit_is_remarked_on():
    pinned = read_params(ROOT / "recipes" / "images-sd35.yaml")
    assert remarks_on_revisions(pinned) == []
    (policy,) = remarks_on_revisions(read_params(ROOT / "recipes" / "reasoning-qwen.yaml"))
    assert policy.startswith("policy.base.revision: 'main' is not a commit")
    (judge,) = [each for each in pinned.reward.judges if each.model is not None]
    model = judge.model.model_copy(update={"revision": "v1.0"})
    judges = [judge.model_copy(update={"model": model})]
    reward = pinned.reward.model_copy(update={"judges": judges})
    (said,) = remarks_on_revisions(pinned.model_copy(update={"reward": reward}))
    assert said.startswith("reward.judges[0].model.revision: 'v1.0' is not a commit")
