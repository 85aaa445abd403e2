"""Every bad input: one line on stderr that names the error, exit code 2, nothing lost."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence, Set
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from grpo.params.manifests import MANIFESTS, describe_data
from grpo.params.parameters import read_params
from grpo.runtime.artifacts.files import exclusive, write_json
from grpo.schema import DATA
from tests.files import contents
from tests.pipeline.corruptions import (
    Corruption,
    both,
    drop_param,
    edit_table,
    edit_tensors,
    leave,
    remove,
    set_cell,
    set_param,
    take,
    truncate,
    without,
    write,
)
from tests.pipeline.processes import run_stage
from tests.pipeline.workspaces import copy_for_dvc, dvc, environment, locked_stages

PROMPTS = "artifacts/prompts/train.parquet"
PROFILE = "artifacts/profile/prompts.parquet"
CURRICULUM = "artifacts/curricula/uniform.parquet"
ROLLOUTS = "artifacts/rollouts/uniform-1"
REWARDS = "artifacts/rewards/uniform-1.parquet"
BASE = "artifacts/policies/base"
TRAINED = "artifacts/policies/sgpo-1"
PROFILED = "artifacts/profile/rollouts"
NORM = "model.norm.weight"
REUSE = set_param("arms.uniform.selection", ["reuse_profile_rollouts"])
# sgpo-2, from what sgpo-1 drew: it continues with that policy and its optimizer.
SECOND = set_param("rounds.sgpo-2", {"arm": "sgpo", "start": "sgpo-1", "phase": 1})
_DRAWN = (
    "artifacts/prompts/train.parquet artifacts/curricula/sgpo.parquet "
    "artifacts/rollouts/sgpo-1 artifacts/rewards/sgpo-1.parquet"
)
CONTINUED = (
    f"{BASE} {BASE} {_DRAWN} {TRAINED} artifacts/training/sgpo-1",
    f"{BASE} {TRAINED} {_DRAWN} artifacts/policies/sgpo-2 artifacts/training/sgpo-2",
)


class Bad(NamedTuple):
    """A bad input: the corruption, the stage that reads it, and the expected message."""

    name: str
    stage: str  # as dvc.lock names it
    corrupt: Corruption
    message: str  # a regular expression
    missing: tuple[str, ...] = ()  # packages not installed
    swap: tuple[str, str] = ("", "")  # in the stage's command


TABLES = [
    Bad("nan reward", "train@uniform-1", set_cell(REWARDS, 5, "reward", float("nan")),
        rf"{REWARDS}: row 5 \(rollout_id='.*'\): column 'reward' must be present"),
    Bad("infinite reward", "train@uniform-1", set_cell(REWARDS, 7, "reward", float("inf")),
        rf"{REWARDS}: row 7 .*'reward' must be finite, got inf"),
    Bad("outcome above one", "train@uniform-1", set_cell(REWARDS, 0, "outcome", 1.5),
        rf"{REWARDS}: row 0 .*'outcome' must be in \[0, 1\], got 1.5"),
    Bad("reward as text", "train@uniform-1",
        edit_table(REWARDS, lambda frame: frame.astype({"reward": str})),
        rf"{REWARDS}: column 'reward' must be .*float64"),
    Bad("unknown status", "train@uniform-1", set_cell(REWARDS, 2, "status", "lucky"),
        rf"{REWARDS}: row 2 .*'status' must be one of .* got lucky"),
    Bad("missing column", "score@uniform-1",
        edit_table(f"{ROLLOUTS}/table.parquet", lambda frame: frame.drop(columns="text")),
        rf"{ROLLOUTS}/table.parquet: column 'text' is missing"),
    Bad("extra column", "curriculum@uniform",
        edit_table(PROFILE, lambda frame: frame.assign(mood="good")),
        rf"{PROFILE}: column 'mood' is unknown"),
    Bad("columns in another order", "curriculum@uniform",
        edit_table(PROFILE, lambda frame: frame[frame.columns[::-1]]),
        rf"{PROFILE}: columns must be \['prompt_id', "),
    Bad("duplicate prompt", "rollout@uniform-1",
        edit_table(PROMPTS, lambda frame: frame.assign(prompt_id="same")),
        rf"{PROMPTS}: row \d+ \(prompt_id='same'\): column 'prompt_id' must be unique"),
    Bad("truncated parquet", "rollout@uniform-1", truncate(PROMPTS),
        rf"{PROMPTS}: must be whole parquet, .*; delete it and rerun"),
    Bad("no parquet", "score@uniform-1", write(PROMPTS, "prompt,answer\n"),
        rf"{PROMPTS}: must be whole parquet"),
    Bad("empty table", "rollout@uniform-1", edit_table(CURRICULUM, lambda frame: frame[:0]),
        rf"{CURRICULUM}: must have at least one row, got an empty table"),
    Bad("missing table", "train@uniform-1", remove(REWARDS),
        rf"{REWARDS}: no such file; run the stage that writes it"),
    Bad("group of one in a curriculum", "rollout@uniform-1",
        set_cell(CURRICULUM, 3, "rollouts", 1),
        rf"{CURRICULUM}: row 3 .*'rollouts' must be >= 2, got 1"),
    Bad("rollouts of the profile cut short", "rollout@uniform-1",
        both(REUSE, truncate(f"{PROFILED}/tensors.safetensors")),
        f"{PROFILED}/tensors.safetensors: must be whole safetensors"),
    Bad("rollouts of the profile that do not fit", "rollout@uniform-1",
        both(REUSE, edit_tensors(f"{PROFILED}/tensors.safetensors", without("tokens"))),
        f"{PROFILED}: must hold"),
    Bad("passed prompts that are no list", "train@uniform-1",
        write(f"{ROLLOUTS}/passed.json", "{}"), f"{ROLLOUTS}/passed.json: must be a list"),
    Bad("curriculum of unknown prompts", "rollout@uniform-1",
        set_cell(CURRICULUM, 0, "prompt_id", "train-nobody"),
        rf"{CURRICULUM}: 'train-nobody' must be a prompt of the training set"),
    Bad("rollouts of unknown prompts", "score@uniform-1",
        edit_table(f"{ROLLOUTS}/table.parquet", lambda frame: frame.replace(
            frame["prompt_id"][4], "train-nobody", regex=True)),
        rf"{ROLLOUTS}/table.parquet: rollout '.*' must have a known prompt"),
    Bad("rewards of another round", "train@uniform-1",
        take(REWARDS, "artifacts/rewards/sgpo-1.parquet"),
        rf"{REWARDS}: must hold one reward per rollout"),
]  # fmt: skip
TENSORS = [
    Bad("truncated safetensors", "train@uniform-1", truncate(f"{ROLLOUTS}/tensors.safetensors"),
        rf"{ROLLOUTS}/tensors.safetensors: must be whole safetensors"),
    Bad("missing safetensors", "train@uniform-1", remove(f"{ROLLOUTS}/tensors.safetensors"),
        rf"{ROLLOUTS}/tensors.safetensors: no such file"),
    Bad("missing tensor", "train@uniform-1",
        edit_tensors(f"{ROLLOUTS}/tensors.safetensors", without("behavior_logp")),
        rf"{ROLLOUTS}/tensors.safetensors: must hold .*'behavior_logp'"),
    Bad("tensors of more rollouts than the table", "train@uniform-1",
        both(both(edit_table(f"{ROLLOUTS}/table.parquet", lambda frame: frame[:-1]),
                  edit_table(REWARDS, lambda frame: frame[:-1])),
             write(f"{ROLLOUTS}/summary.json", '{"rollouts": 127}')),
        rf"{ROLLOUTS}/tensors.safetensors: holds 128 rollouts of 16 prompts, its table 127"),
    Bad("tensors of more steps than they say", "train@uniform-1",
        edit_tensors(f"{ROLLOUTS}/tensors.safetensors",
                     lambda tensors: tensors | {"tokens": tensors["tokens"][:-1]}),
        rf"{ROLLOUTS}/tensors.safetensors: tokens must have \d+ entries"),
    Bad("cost that is no JSON", "train@uniform-1", truncate(f"{ROLLOUTS}/cost.json"),
        rf"{ROLLOUTS}/cost.json: must be JSON"),
    Bad("cost of unknown fields", "train@uniform-1", write(f"{ROLLOUTS}/cost.json", '{"euros": 3}'),
        rf"{ROLLOUTS}/cost.json: must hold"),
]  # fmt: skip
POLICIES = [
    Bad("policy without configuration", "rollout@uniform-1", remove(f"{BASE}/config.json"),
        rf"{BASE}/config.json: no such file"),
    Bad("configuration that is no JSON", "rollout@uniform-1", truncate(f"{BASE}/config.json"),
        rf"{BASE}/config.json: must be JSON"),
    Bad("tokenizer that is no JSON", "rollout@uniform-1", truncate(f"{BASE}/tokenizer.json"),
        rf"{BASE}/tokenizer.json: must be JSON"),
    Bad("configuration that its class refuses", "rollout@uniform-1",
        write(f"{BASE}/config.json", '{"model_type": "llama", "hidden_size": "wide"}'),
        rf"{BASE}: must be a complete policy directory, .*hidden_size"),
    Bad("policy without tokenizer", "rollout@uniform-1", remove(f"{BASE}/tokenizer.json"),
        rf"{BASE}: must be a complete policy directory"),
    Bad("policy without weights", "evaluate@uniform-1",
        remove("artifacts/policies/uniform-1/model.safetensors"),
        r"artifacts/policies/uniform-1/model.safetensors: no such file"),
    Bad("truncated weights", "evaluate@uniform-1",
        truncate("artifacts/policies/uniform-1/model.safetensors"),
        r"artifacts/policies/uniform-1/model.safetensors: must be whole"),
    Bad("weights of another shape", "profile",
        edit_tensors(f"{BASE}/model.safetensors",
                     lambda tensors: tensors | {NORM: tensors[NORM][:4]}),
        rf"{BASE}: must hold the weights of its config.json, 1 mismatched, the first is .*{NORM}"),
    Bad("weights without a layer", "profile",
        edit_tensors(f"{BASE}/model.safetensors", without(NORM)),
        rf"{BASE}: must hold the weights of its config.json, 1 missing, the first is {NORM}"),
    Bad("weights of an unknown layer", "profile",
        edit_tensors(f"{BASE}/model.safetensors",
                     lambda tensors: tensors | {"model.extra": tensors[NORM]}),
        rf"{BASE}: must hold the weights of its config.json, 1 unexpected, the first is "
        "model.extra"),
    Bad("state without its cost", "train@uniform-1",
        write(f"{BASE}/state.json", '{"name": "base"}'),
        rf"{BASE}/state.json: must hold the fields of a policy state, 'cost'"),
    Bad("missing optimizer", "train@sgpo-1",
        both(SECOND, remove(f"{TRAINED}/optimizer.safetensors")),
        rf"{TRAINED}/optimizer.safetensors: no such file", swap=CONTINUED),
    Bad("truncated optimizer", "train@sgpo-1",
        both(SECOND, truncate(f"{TRAINED}/optimizer.safetensors")),
        rf"{TRAINED}/optimizer.safetensors: must be whole", swap=CONTINUED),
    Bad("optimizer without the moments of a layer", "train@sgpo-1",
        both(SECOND,
             edit_tensors(f"{TRAINED}/optimizer.safetensors", without(f"{NORM}/exp_avg"))),
        rf"{TRAINED}/optimizer.safetensors: lacks the moments of {NORM}",
        swap=CONTINUED),
    Bad("optimizer of another model", "train@sgpo-1",
        both(SECOND, edit_tensors(f"{TRAINED}/optimizer.safetensors",
                                  lambda moments: {k: v[..., :1] if "exp" in k else v
                                                   for k, v in moments.items()})),
        rf"{TRAINED}/optimizer.safetensors: .*another model", swap=CONTINUED),
]  # fmt: skip
JSONL = {
    "kind": "jsonl",
    "directory": None,
    "train": "train.jsonl",
    "eval": "eval.jsonl",
    "columns": {},
    "instruction": "",
}
IMPORTED = both(
    both(set_param("task", JSONL), set_param("reward.judges.0.judge", "math")),
    set_param("policy.base", {"source": "directory", "path": "model"}),
)
LINE = '{"prompt": "1+1=", "answer": "2"}\n'


def import_prompts(train: str, evaluation: str) -> Corruption:
    """Has check see two files of prompts, as under dvc."""

    def corrupt(workspace: Path) -> None:
        for change in (
            IMPORTED,
            write("data/train.jsonl", train),
            write("data/eval.jsonl", evaluation),
        ):
            change(workspace)
        with chdir(workspace):
            write_json(MANIFESTS / "task.json", describe_data(read_params(), DATA, "task"))

    return corrupt


PARAMETERS = [
    Bad("Ray that is not installed", "score@uniform-1",
        set_param("sampling", {"executor": "ray", "workers": 2}),
        r"params.yaml: sampling.executor ray needs ray; run pip install -e '.\[ray\]'",
        missing=("ray",)),
    Bad("missing params.yaml", "score@uniform-1", remove("params.yaml"),
        r"params.yaml: no such file; run python -m grpo params recipes/NAME"),
    Bad("invalid yaml", "check", write("params.yaml", "seed: [1,\n"), r"params.yaml: must be YAML"),
    Bad("params.yaml in another encoding", "check", write("params.yaml", b"seed: \xff\xfe"),
        r"params.yaml: must be YAML"),
    Bad("two clips", "check",
        set_param("arms.sgpo.objective", ["rloo", {"clip_surrogate": {"low": 0.2, "high": 0.2}}]),
        r"params.yaml: U11 ERROR arms.sgpo.objective\[1\].clip_surrogate: "),
    Bad("negative learning rate", "train@uniform-1",
        set_param("arms.uniform.training.learning_rate", -0.1),
        r"params.yaml: arms.uniform.training.learning_rate must be greater than 0, got -0.1"),
    Bad("more prompts than the phase has", "rollout@uniform-1",
        set_param("arms.uniform.selection", [{"skip_uniform_prompts": {"prompts": 17}}]),
        "params.yaml: arms.uniform.selection: skip_uniform_prompts needs 17 prompts, the phase "
        "has 16"),
    Bad("phase beyond the curriculum", "rollout@uniform-1", set_param("rounds.uniform-1.phase", 2),
        r"params.yaml: rounds.uniform-1.phase: phase must be one of \[1\], .* got 2"),
    Bad("round that is not in params.yaml", "rollout@uniform-1",
        drop_param("rounds.uniform-1"), r"params.yaml: rounds.uniform-1 is missing"),
    Bad("arm that is not in params.yaml", "curriculum@uniform",
        both(drop_param("rounds.uniform-1"), drop_param("arms.uniform")),
        r"params.yaml: arms.uniform is missing"),
    Bad("unknown family", "prepare",
        both(set_param("task.families", {"alchemy": {}}), set_param("task.notation", "question")),
        r"params.yaml: task.families.alchemy must be a reasoning-gym family"),
    Bad("family without compact notation", "prepare", set_param("task.families", {"sudoku": {}}),
        r"params.yaml: task.families.sudoku has no compact notation"),
    Bad("unknown difficulty", "prepare", set_param("task.families.gcd", {"length": 3}),
        r"params.yaml: task.families.gcd .*length"),
    Bad("family out of prompts", "prepare", set_param("task.families.gcd.max_value", 3),
        r"params.yaml: task.families.gcd must have 30 different prompts .*, got \d+"),
    Bad("missing jsonl", "prepare", IMPORTED,
        r"params.yaml: task.train must be a file, data/train.jsonl is not one"),
    Bad("jsonl line without answer", "prepare",
        import_prompts(LINE + '{"prompt": "1+2="}\n', LINE),
        r"data/train.jsonl: line 2 must have 'answer', got \['prompt'\]"),
    Bad("empty jsonl", "prepare",
        import_prompts(LINE, "\n"), r"data/eval.jsonl: must"),
    Bad("prompts in train and eval", "prepare",
        import_prompts(LINE, LINE),
        r"data/eval.jsonl: line 1: the prompt .* duplicates data/train.jsonl: line 1 \("),
    Bad("more prompts asked for than there are", "curriculum@uniform",
        set_param("arms.uniform.curriculum.0.split_at_random.prompts_per_phase", 400),
        r"params.yaml: arms.uniform.curriculum.* needs 400 prompts, the selection has 40"),
    Bad("curriculum that keeps nothing", "curriculum@sgpo",
        set_param("arms.sgpo.curriculum.0", {"keep_rate_window": {"low": 0.51, "high": 0.52}}),
        r"params.yaml: arms.sgpo.curriculum: keep_rate_window leaves no prompt of 40"),
    Bad("unknown architecture", "base",
        set_param("policy.base.architecture", "PerceptronForCausalLM"),
        r"params.yaml: policy.base.architecture must be a causal LM class"),
    Bad("configuration refused by its class", "base",
        set_param("policy.base.config.num_attention_heads", 5),
        r"params.yaml: policy.base.config is refused: .*hidden size"),
    Bad("configuration that says what the tokenizer says", "base",
        set_param("policy.base.config.vocab_size", 64),
        r"params.yaml: policy.base.config is refused: .*multiple values.*vocab_size"),
    Bad("missing directory of a base", "base",
        set_param("policy.base", {"source": "directory", "path": "model"}),
        r"params.yaml: policy.base.path must be a directory, data/model is not"),
    Bad("missing gguf package", "base",
        set_param("policy.base", {"source": "gguf", "package": "llm_nobody", "file": "a.gguf"}),
        r"params.yaml: policy.base.package must be installed, got 'llm_nobody'; run pip install"),
    Bad("missing peft", "rollout@uniform-1",
        set_param("policy.lora",
                  {"rank": 2, "alpha": 2, "dropout": 0.0, "target_modules": ["q_proj"]}),
        r"params.yaml: policy.lora needs peft; run pip install", missing=("peft",)),
    Bad("missing package of a judge", "score@uniform-1", set_param("reward.judges.0.judge", "math"),
        r"params.yaml: reward.judges\[0\].judge math needs math-verify; run pip install",
        missing=("math_verify",)),
    Bad("cuda without a gpu", "rollout@uniform-1", set_param("machine.device", "cuda"),
        r"params.yaml: machine.device cuda needs a GPU, found none; set cpu"),
    Bad("too few paths", "score@uniform-1", leave,
        r"python -m stages.score takes the paths judge prompts rollouts out, got 3",
        swap=(f" {PROMPTS}", "")),
]  # fmt: skip


COMMON = {  # in every run of the tests
    *("nan reward", "missing column", "duplicate prompt", "truncated parquet", "missing table"),
    *("curriculum of unknown prompts", "rewards of another round", "truncated safetensors"),
    *("tensors of more rollouts than the table", "configuration that is no JSON"),
    *("policy without weights", "weights of another shape", "missing optimizer", "invalid yaml"),
    *("two clips", "phase beyond the curriculum", "family out of prompts", "unknown architecture"),
    *("prompts in train and eval", "curriculum that keeps nothing", "missing gguf package"),
    *("cuda without a gpu", "too few paths", "Ray that is not installed", "missing peft"),
    *("jsonl line without answer", "policy without tokenizer", "cost that is no JSON"),
}


def cases(bads: Sequence[Bad], common: Set[str]) -> list[Any]:
    """Returns the parameters of a test; those that are not common are for long runs."""
    assert common <= {bad.name for bad in bads}
    return [
        pytest.param(bad, id=bad.name, marks=() if bad.name in common else pytest.mark.long)
        for bad in bads
    ]


@pytest.mark.parametrize("bad", cases([*TABLES, *TENSORS, *POLICIES, *PARAMETERS], COMMON))
def test_a_bad_input_is_one_line_and_loses_nothing(workspace: Path, bad: Bad):
    bad.corrupt(workspace)
    refuses(workspace, bad)


def refuses(workspace: Path, bad: Bad) -> None:
    """Asserts that a stage ends with one line and code 2, and changes no artifact.

    Before it are the lines of what it has done.
    """
    command = locked_stages(workspace)[bad.stage]["cmd"].replace(*bad.swap)
    before = all_but_the_page(workspace)
    ended = run_stage(workspace, bad.stage, command, missing=bad.missing)
    assert ended.code == 2, ended.stderr
    *done, error = ended.stderr.splitlines()
    assert re.fullmatch(rf"{bad.message}.*", error), ended.stderr
    assert all(re.match(r"[a-z-]+( [\w-]+)* \d+/\d+, ", each) for each in done), ended.stderr
    assert all_but_the_page(workspace) == before


def all_but_the_page(workspace: Path) -> dict[str, bytes]:
    """Returns all artifacts but the page, on which a stage that fails is marked."""
    found = contents(workspace / "artifacts")
    del found["report/index.html"]
    return found


def test_one_stage_runs_once_at_a_time(workspace: Path):
    lock = ".work/score@uniform-1.lock"
    with exclusive(workspace / lock, "this test"):
        refuses(
            workspace,
            Bad("busy", "score@uniform-1", leave, rf"{lock}: stage .* is already running here"),
        )
    command = locked_stages(workspace)["score@uniform-1"]["cmd"]
    assert run_stage(workspace, "score@uniform-1", command).code == 0


@pytest.mark.long
def test_dvc_passes_the_line_on_and_loses_nothing(finished: Path, tmp_path: Path):
    """As in use: a shell, dvc, and the stage in a separate process."""
    workspace = copy_for_dvc(finished, tmp_path / "workspace")
    set_param("arms.uniform.training.learning_rate", -0.1)(workspace)
    command = [sys.executable, "-m", "dvc", "repro"]
    done = subprocess.run(command, cwd=workspace, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0
    line = "params.yaml: arms.uniform.training.learning_rate must be greater than 0, got -0.1"
    assert done.stderr.splitlines()[0] == line
    assert "Traceback" not in done.stderr
    assert (workspace / "dvc.lock").read_bytes() == (finished / "dvc.lock").read_bytes()
    shutil.copyfile(finished / "params.yaml", workspace / "params.yaml")
    dvc(workspace, "checkout", "--quiet")
    assert all_but_the_page(workspace) == all_but_the_page(finished)
