"""Every bad parameter: `python -m grpo check` prints one line with its path and exits with 2."""

import re
import sys
from pathlib import Path

import pytest

from grpo.__main__ import main
from tests.pipeline.corruptions import (
    Corruption,
    add_named,
    both,
    copy_param,
    drop_param,
    rename_param,
    set_param,
)
from tests.pipeline.workspaces import write_two_arms

ROUND = {"arm": "sgpo", "start": "base", "phase": 1}
VLLM = {"tensor_parallel_size": 1, "memory_share": 0.1, "prefix_caching": True, "compiled": False}
SERVER = {"url": "http://127.0.0.1:8000", "concurrency": 4, "timeout_seconds": 9.0, "retries": 1,
          "retry_seconds": 1.0, "directory": "/shared"}  # fmt: skip
FIXED = {"fix_group_size": {"rollouts": 8}}
WRONG: list[tuple[str, Corruption, str]] = [
    ("wrong type", set_param("seed", "zero"), "seed must be an integer, got 'zero'"),
    ("number as text", set_param("task.train_prompts", "40"), "task.train_prompts must be"),
    ("fraction of a prompt", set_param("task.train_prompts", 0.5), "task.train_prompts must be"),
    ("missing key", drop_param("evaluation.confidence"), "evaluation.confidence is missing"),
    ("missing section", drop_param("reward"), "reward is missing"),
    ("unknown key", set_param("policy.max_tokens", 9), "policy.max_tokens is unknown, got 9"),
    ("unknown section", set_param("colour", "red"), "colour is unknown"),
    ("negative learning rate", set_param("arms.uniform.training.learning_rate", -0.1),
     "arms.uniform.training.learning_rate must be greater than 0, got -0.1"),
    ("infinite learning rate", set_param("arms.uniform.training.learning_rate", float("inf")),
     "arms.uniform.training.learning_rate must be a finite number"),
    ("one beta", set_param("arms.uniform.training.betas", [0.9]),
     "arms.uniform.training.betas"),
    ("temperature of zero", set_param("arms.uniform.sampling.temperature", 0.0),
     "arms.uniform.sampling.temperature must be greater than 0"),
    ("confidence of one", set_param("evaluation.confidence", 1.0),
     "evaluation.confidence must be less than 1"),
    ("unknown device", set_param("machine.device", "tpu"), "machine.device must be 'cpu' or"),
    ("workers that the stage would not have",
     set_param("sampling", {"executor": "local", "workers": 2}),
     "sampling.workers must be 1 with sampling.executor local, got 2"),
    ("no workers", set_param("sampling", {"executor": "processes", "workers": 0}),
     "sampling.workers must be greater than 0"),
    ("unknown executor", set_param("sampling.executor", "dask"),
     "sampling.executor must be 'local', 'processes' or 'ray', got 'dask'"),
    ("sampler for an executor", set_param("sampling.executor", "vllm"),
     "sampling.executor must be local, processes or ray; vllm is a policy.sampler, got 'vllm'"),
    ("vllm on a cpu without a share of memory", set_param("policy.sampler", "vllm"),
     "with policy.sampler vllm, policy.vllm must be stated on a CPU"),
    ("an engine that nothing uses", set_param("policy.vllm", VLLM),
     "policy.vllm must be removed with policy.sampler transformers"),
    ("no rank of an engine", set_param("policy.vllm", {**VLLM, "tensor_parallel_size": 0}),
     "policy.vllm.tensor_parallel_size must be greater than 0, got 0"),
    ("more than all memory", set_param("policy.vllm", {**VLLM, "memory_share": 1.5}),
     "policy.vllm.memory_share must be at most 1"),
    ("half of an engine", set_param("policy.vllm", {"memory_share": 0.5}),
     "policy.vllm.tensor_parallel_size is missing"),
    ("a server without an address", set_param("policy.sampler", "vllm_server"),
     "with policy.sampler vllm_server, policy.server must be stated"),
    ("a server that nothing asks", set_param("policy.server", SERVER),
     "policy.server must be removed with policy.sampler transformers"),
    ("a user in an address", set_param("policy.server", {**SERVER, "url": "http://me:pw@host"}),
     "policy.server.url must have no user or password; name a key_variable instead"),
    ("a key as a parameter", set_param("policy.server", {**SERVER, "key_variable": "sk-12345"}),
     "policy.server.key_variable must be the name of an environment variable"),
    ("a directory that depends on the workspace",
     set_param("policy.server", {**SERVER, "directory": "shared"}),
     "policy.server.directory must be an absolute path"),
    ("unknown sampler", set_param("policy.sampler", "ollama"), "policy.sampler must be"),
    ("unknown task", set_param("task.kind", "poetry"), "task.kind .*'poetry'"),
    ("unknown source of a base", set_param("policy.base.source", "cloud"),
     "policy.base.source .*'cloud'"),
    ("unknown judge", set_param("reward.judges.0.judge", "oracle"),
     r"reward.judges\[0\].judge must be .*'oracle'"),
    ("pattern without a group", set_param("reward.answer_pattern", "#.*"),
     "reward.answer_pattern must have exactly one group"),
    ("pattern that is none", set_param("reward.answer_pattern", "(#"),
     "reward.answer_pattern must be a regular expression"),
    ("no rounds", set_param("rounds", {}), "rounds .*at least 1 item"),
    ("no curriculum", set_param("arms.sgpo.curriculum", []),
     "arms.sgpo.curriculum .*at least 1 item"),
    ("unknown link", set_param("arms.sgpo.objective.0", "rlooo"),
     r"arms.sgpo.objective\[0\] must be one of .*'rlooo'"),
    ("unknown setting of a link", set_param("arms.sgpo.objective.0", {"rloo": {"lo": 0.2}}),
     r"arms.sgpo.objective\[0\].rloo.lo is unknown, must be one of \['high', 'low'\]"),
    ("missing setting of a link", set_param("arms.sgpo.objective.0", {"penalize_kl": {}}),
     r"arms.sgpo.objective\[0\].penalize_kl.beta is missing"),
    ("setting of another type", set_param("arms.sgpo.objective.0", {"rloo": {"low": "wide"}}),
     r"arms.sgpo.objective\[0\].rloo.low must be a number, got 'wide'"),
    ("setting that is a list", set_param("arms.sgpo.objective.0", {"rloo": {"low": [1]}}),
     r"arms.sgpo.objective\[0\].rloo.low must be .* got \[1\]"),
    ("link that is a number", set_param("arms.sgpo.objective.0", 3),
     r"arms.sgpo.objective\[0\] must be .* got 3"),
    ("setting out of range", set_param("arms.sgpo.objective.0", {"rloo": {"low": -1.0}}),
     r"arms.sgpo.objective\[0\].rloo: clip_surrogate needs"),
    ("two links in one", set_param("arms.sgpo.objective.0", {"rloo": {}, "gspo": {}}),
     r"arms.sgpo.objective\[0\] must name one component"),
    ("a link with state, twice",
     set_param("arms.sgpo.objective", ["center_by_moving_average"] * 2),
     "arms.sgpo.objective: a link with state must occur in a chain once"),
    ("unknown curriculum step", set_param("arms.sgpo.curriculum.0", "drop_boring"),
     r"arms.sgpo.curriculum\[0\] must be one of .*'drop_boring'"),
    ("group of one", set_param("arms.uniform.curriculum.1.fix_group_size.rollouts", 1),
     r"arms.uniform.curriculum\[1\].fix_group_size: .* at least 2, got 1: a group of one has no"),
    ("sizes upside down",
     set_param("arms.sgpo.curriculum.2.size_groups_by_inverse_rate.smallest", 16),
     r"arms.sgpo.curriculum\[2\].size_groups_by_inverse_rate: .* largest >= smallest"),
    ("no group sizes", set_param("arms.uniform.curriculum.1", {"drop_trivial": {"above": 1.0}}),
     "arms.uniform.curriculum: a curriculum needs a step that sizes groups, such as fix_"),
    ("no phases", set_param("arms.uniform.curriculum", [FIXED]),
     "arms.uniform.curriculum: a curriculum needs a step that makes phases, such as split_"),
    ("phases before sizes",
     set_param("arms.sgpo.curriculum", [{"split_easy_to_hard": {"phases": 1}}, FIXED]),
     "arms.sgpo.curriculum: split_easy_to_hard must come after a step that sizes groups"),
    ("unknown selection", set_param("arms.uniform.selection", ["skip_boring"]),
     r"arms.uniform.selection\[0\] must be one of .*'skip_boring'"),
    ("no selection stated", drop_param("arms.uniform.selection"),
     "arms.uniform.selection is missing"),
    ("more prompts than the phase has",
     set_param("arms.uniform.selection", [{"skip_uniform_prompts": {"prompts": 17}}]),
     "arms.uniform.selection: skip_uniform_prompts needs 17 prompts, the phase has 16"),
    ("batches that cannot be enough",
     set_param("arms.uniform.selection", [{"resample_uniform_groups": {
         "prompts": 9, "prompts_per_batch": 2, "max_batches": 4}}]),
     r"arms.uniform.selection\[0\].resample_uniform_groups: .* got 2 \* 4 < 9"),
    ("reuse at another temperature",
     both(set_param("arms.uniform.selection", ["reuse_profile_rollouts"]),
          set_param("arms.uniform.sampling.temperature", 0.5)),
     "arms.uniform.sampling.temperature must equal evaluation.sampling.temperature, .* got 0.5 and "
     "1.0"),
    ("first answers for an unknown judge",
     set_param("arms.uniform.selection", [{"revise_first_answers": {"judge": "boxes"}}]),
     r"arms.uniform.selection: revise_first_answers.judge must be one of reward.judges, "
     r"\['reasoning_gym'\], got 'boxes'; add it there"),
    ("first answers without stored scores",
     set_param("arms.uniform.selection", [{"revise_first_answers": {"judge": "reasoning_gym"}}]),
     "arms.uniform.selection: revise_first_answers.judge: scores are stored only with several"),
    ("a template without the answer",
     set_param("arms.uniform.selection",
               [{"revise_first_answers": {"judge": "reasoning_gym", "template": "again"}}]),
     r"arms.uniform.selection\[0\].revise_first_answers: .*template must hold \{answer\}"),
    ("stages of other families",
     set_param("arms.uniform.curriculum.0",
               {"stage_by_family": {"order": "gcd, poetry", "prompts_per_phase": 4}}),
     r"arms.uniform.curriculum: stage_by_family.order must name the families of the task, "
     r"\['gcd', 'letter_counting'\], got \['gcd', 'poetry'\]"),
    ("a stage twice",
     set_param("arms.uniform.curriculum.0",
               {"stage_by_family": {"order": "gcd, gcd", "prompts_per_phase": 4}}),
     r"arms.uniform.curriculum\[0\].stage_by_family: stage_by_family.order must name each"),
    ("unknown arm", set_param("rounds.sgpo-1.arm", "nobody"),
     r"rounds.sgpo-1.arm must be one of \['sgpo', 'uniform'\], got 'nobody'"),
    ("start from a later round", set_param("rounds.uniform-1.start", "sgpo-1"),
     "rounds.uniform-1.start must be 'base' or a round above it, got 'sgpo-1'"),
    ("start from itself", set_param("rounds.sgpo-1.start", "sgpo-1"),
     "rounds.sgpo-1.start must be 'base' or a round above it, got 'sgpo-1'"),
    ("round named base", set_param("rounds.base", ROUND), "rounds.base: 'base' is the base"),
    ("arm named base", copy_param("arms.uniform", "arms.base"), "arms.base: 'base' is the base"),
    ("round named with a blank", set_param("rounds.sgpo 1", ROUND),
     "rounds.sgpo 1 must be at most 64 letters, digits, _ and -, a letter or digit first"),
    ("phase zero", set_param("rounds.sgpo-1.phase", 0), "rounds.sgpo-1.phase must be greater"),
    ("phase beyond the curriculum", set_param("rounds.sgpo-1.phase", 2),
     "rounds.sgpo-1.phase must be at most 1, the phases of arms.sgpo.curriculum, got 2"),
    ("phases of more prompts than the task makes",
     set_param("arms.uniform.curriculum.0",
               {"split_at_random": {"phases": 3, "prompts_per_phase": 20}}),
     r"arms.uniform.curriculum\[0\].split_at_random needs 60 prompts, task.train_prompts is 40;"),
    ("arm that is a word of the types",
     both(set_param("arms.hub", {}), set_param("rounds.sgpo-1.arm", "hub")),
     "arms.hub.curriculum is missing"),
]  # fmt: skip

CONFIG = "policy.base.config"
JSONL = {
    "kind": "jsonl", "directory": None, "train": "a", "eval": "b", "columns": {}, "instruction": "",
}  # fmt: skip
TOO_LARGE = [
    (f"{value} for {path}", set_param(path, value), f"{path} must be .*, got {value}$")
    for path, value in (
        ("evaluation.rollouts_per_prompt", 10**12),
        ("profile.rollouts_per_prompt", 10**9),
        ("policy.max_steps", 10**9),
        (f"{CONFIG}.num_hidden_layers", 10**6),
        (f"{CONFIG}.num_hidden_layers", 0),
        (f"{CONFIG}.num_hidden_layers", -1),
        (f"{CONFIG}.hidden_size", 0),
        (f"{CONFIG}.hidden_size", -32),
        (f"{CONFIG}.num_attention_heads", 0),
    )
]
LINK = r"arms.sgpo.objective\[0\]"
TRAINING = "arms.uniform.training"  # which is the other arm's too
WRONG += [
    *TOO_LARGE,
    (
        "a rank that no model has",
        set_param(
            "policy.lora",
            {"rank": 10**9, "alpha": 2, "dropout": 0.0, "target_modules": ["q_proj"]},
        ),
        "policy.lora.rank must be at most 65536, got 10*$",
    ),
    (
        "a repetition beyond 64 bits",
        set_param("reward.answer_pattern", "(a{99999999999999})"),
        "reward.answer_pattern must be a regular expression: .*too large",
    ),
    (
        "a pattern that nests too deep",
        set_param("reward.answer_pattern", "(" * 5000 + ")" * 5000),
        "reward.answer_pattern must be a regular expression: .*recursion",
    ),
    (
        "scores of infinite width",
        set_param("reward.judges.0.score_range", [-1e308, 1e308]),
        r"reward.judges\[0\].score_range must be of a finite width, got",
    ),
    (
        "a column without a name",
        set_param("task", {**JSONL, "columns": {"prompt": ""}}),
        "task.columns.prompt must have at least 1 character, got ''",
    ),
    (
        "one column for both",
        set_param("task", {**JSONL, "columns": {"answer": "prompt"}}),
        "task.columns must name different columns for prompt and answer, got",
    ),
    (
        "three decays",
        set_param(f"{TRAINING}.betas", [0.9, 0.9, 0.9]),
        rf"{TRAINING}.betas must have at most 2 items, got \(0.9, 0.9, 0.9\)",
    ),
    (
        "decays of one",
        set_param(f"{TRAINING}.betas", [1, 1]),
        rf"{TRAINING}.betas\[0\] must be less than 1, got 1",
    ),
    (
        "second decay of one",
        set_param(f"{TRAINING}.betas", [0.9, 1.0]),
        rf"{TRAINING}.betas\[1\] must be less than 1, got 1.0",
    ),
    (
        "a limit too short for any judge",
        set_param("reward.timeout_seconds", 1e-9),
        "reward.timeout_seconds must be at least 0.01, got 1e-09",
    ),
    (
        "a limit beyond timers",
        set_param("reward.timeout_seconds", 1e30),
        "reward.timeout_seconds must be at most 86400",
    ),
    (
        "resamples beyond memory",
        set_param("evaluation.bootstrap_resamples", 10**12),
        "evaluation.bootstrap_resamples must be at most 1000000, got 10*$",
    ),
    (
        "threads that no machine has",
        set_param("machine.threads", 10**6),
        "machine.threads must be at most 1024, got 10*$",
    ),
    (
        "workers that no machine has",
        set_param("sampling", {"executor": "ray", "workers": 10**6}),
        "sampling.workers must be at most 4096, got 10*$",
    ),
    (
        "ranks that no machine has",
        set_param(f"{TRAINING}.ranks", 10**6),
        f"{TRAINING}.ranks must be at most 4096, got 10*$",
    ),
    (
        "prompts that no machine has",
        set_param("task.train_prompts", 10**12),
        "task.train_prompts must be at most 1000000000, got 10*$",
    ),
    (
        "a width that no machine has",
        set_param("policy.base.config.hidden_size", 10**9),
        "policy.base.config.hidden_size must be at most 16777216, got 10*$",
    ),
    (
        "weights that no machine has",
        set_param("policy.base.config.hidden_size", 10**6),
        "policy.base.config must be of a model whose weights take at most 1 TiB, got about",
    ),
    (
        "a truth value for a setting",
        set_param("arms.sgpo.objective.0", {"rloo": {"low": True}}),
        rf"{LINK}.rloo.low must be a number, got True",
    ),
    (
        "a truth value in YAML 1.1",
        set_param("machine.compile", "yes"),
        "machine.compile must be true or false, got 'yes'",
    ),
    (
        "a list in a configuration",
        set_param("policy.base.config.hidden_size", [1]),
        r"policy.base.config.hidden_size must be .* or true or false, got \[1\]",
    ),
    ("nothing in a section", set_param("machine", None), "machine must be a mapping, got null"),
    (
        "a text for a list",
        set_param("arms.sgpo.selection", "none"),
        "arms.sgpo.selection must be a list, got 'none'",
    ),
    (
        "a misspelled key",
        rename_param(f"{TRAINING}.learning_rate", "learning_rat"),
        f"{TRAINING}.learning_rat is unknown, got .*; is it learning_rate\\?",
    ),
    (
        "a misspelled section",
        rename_param("reward", "rewards"),
        r"rewards is unknown, got .*; is it reward\?",
    ),
    (
        "a misspelled value",
        set_param("machine.dtype", "bfloat"),
        r"machine.dtype must be 'float32' or 'bfloat16', got 'bfloat'; is it bfloat16\?",
    ),
    (
        "a misspelled kind",
        set_param("task.kind", "reasoning-gym"),
        r"task.kind must be one of .*, got 'reasoning-gym'; is it reasoning_gym\?",
    ),
    ("no kind", drop_param("task.kind"), "task.kind is missing$"),
    (
        "a misspelled link",
        set_param("arms.sgpo.objective.0", "rlooo"),
        rf"{LINK} must be one of .*, got 'rlooo'; is it rloo\?",
    ),
    (
        "a misspelled setting",
        set_param("arms.sgpo.objective.0", {"rloo": {"hihg": 0.2}}),
        rf"{LINK}.rloo.hihg is unknown, must be one of .*; is it high\?",
    ),
    (
        "a path outside of data",
        set_param("policy.base", {"source": "directory", "path": "../x"}),
        r"policy.base.path must lie under data/, got '../x'",
    ),
    (
        "a package by its file",
        set_param("policy.base", {"source": "gguf", "package": "a/b", "file": "c"}),
        r"policy.base.package must be the name by which Python imports",
    ),
]
WRONG += [
    (f"{value} in {path}", set_param(path, value), rf".* must be a finite number, got {value}")
    for value in (float("nan"), float("inf"), -float("inf"))
    for path in ("reward.threshold", f"{TRAINING}.betas.0")
]
WRONG += [
    (
        f"{value} in a link",
        set_param("arms.sgpo.objective.0", {"penalize_kl": {"beta": value}}),
        rf"{LINK}.penalize_kl.beta must be a finite number, got {value}",
    )
    for value in (float("nan"), float("inf"))
]
WRONG += [
    (
        f"{what} named {name[:20]!r}",
        add_named(what, name),
        rf"{what}.{re.escape(name[:80].strip())}.* must be at most 64 letters, digits, _ and -, a",
    )
    for what in ("arms", "rounds")
    for name in ("a.b", "a/b", "../a", "-a", "a@b", "a" * 300, "", "é", "a\n", ".", "${a}")
]

# One of each place that refuses a component.
OF_COMPONENTS = ("unknown link", "a link with state, twice", "no phases", "unknown selection",
                 "more prompts than the phase has", "phase beyond the curriculum")  # fmt: skip


def check(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Returns the exit code of `python -m grpo check FILE`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["grpo", "check", file])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


@pytest.mark.parametrize(
    ("corrupt", "message"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG]
)
def test_a_bad_parameter_is_one_line_with_its_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    corrupt: Corruption,
    message: str,
):
    write_two_arms(tmp_path / "params.yaml")
    corrupt(tmp_path)
    assert check(tmp_path, "params.yaml", monkeypatch) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(rf"params.yaml: {message}.*\n", line), line


@pytest.mark.parametrize("name", OF_COMPONENTS)
def test_the_line_names_the_file_that_was_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
):
    corrupt, message = next(each[1:] for each in WRONG if each[0] == name)
    write_two_arms(tmp_path / "params.yaml")
    corrupt(tmp_path)
    (tmp_path / "params.yaml").rename(tmp_path / "mine.yaml")
    assert check(tmp_path, "mine.yaml", monkeypatch) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(rf"mine.yaml: {message}.*\n", line), line
