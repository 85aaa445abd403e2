"""Artifacts that were edited: every contradiction is one line with file, row and column."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.pipeline.corruptions import (
    Arrays,
    Corruption,
    both,
    edit_table,
    edit_tensors,
    set_cell,
    set_param,
    take,
    write,
)
from tests.pipeline.test_bad_inputs import (
    BASE,
    CURRICULUM,
    NORM,
    PROFILE,
    REWARDS,
    ROLLOUTS,
    Bad,
    cases,
    refuses,
)

STATE = "artifacts/policies/uniform-1/state.json"
SGPO = "artifacts/curricula/sgpo.parquet"
TABLE, TENSORS = f"{ROLLOUTS}/table.parquet", f"{ROLLOUTS}/tensors.safetensors"
EVAL = "artifacts/prompts/eval.parquet"
RERUN = ".*; rerun "
LATER_PARTS = ["sum_later_part_scores", "average_over_rollouts", "clip_surrogate"]
LEARNING_RATE = "arms.uniform.training.learning_rate"
LOWER = rf"; lower {LEARNING_RATE}, which is 1e\+30, in params.yaml"


def set_entry(path: str, name: str, index: int, value: float) -> Corruption:
    def change(tensors: Arrays) -> Arrays:
        changed = tensors[name].copy()
        changed.reshape(-1)[index] = value
        return {**tensors, name: changed}

    return edit_tensors(path, change)


def set_state(field: str, value: object) -> Corruption:
    """Sets a field of the state of uniform-1's policy."""

    def corrupt(workspace: Path) -> None:
        path = workspace / STATE
        path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    return corrupt


def drop_last(workspace: Path) -> None:
    """Takes the last rollout out of table, tensors and rewards alike."""
    table = pd.read_parquet(workspace / TABLE)
    steps, last = int(table["steps"].iloc[-1]), table["rollout_id"].iloc[-1]
    cut = {"steps": 1, "tokens": steps, "behavior_logp": steps}
    edit_tensors(
        TENSORS, lambda all: {k: v[: len(v) - cut[k]] if k in cut else v for k, v in all.items()}
    )(workspace)
    edit_table(TABLE, lambda frame: frame[:-1])(workspace)
    edit_table(REWARDS, lambda frame: frame[frame["rollout_id"] != last])(workspace)


EDITED = [
    Bad("behavior log-prob of nan", "train@uniform-1",
        set_entry(TENSORS, "behavior_logp", 3, np.nan),
        rf"{TENSORS}: tensor 'behavior_logp' must be finite, got nan at \[3\]{RERUN}"),
    Bad("behavior log-prob above 0", "train@uniform-1",
        set_entry(TENSORS, "behavior_logp", 0, 0.5),
        rf"{TENSORS}: behavior_logp of row 0, entry 0, must be a log-prob, at most 0, got 0.5"),
    Bad("token outside the vocabulary", "train@uniform-1", set_entry(TENSORS, "tokens", 0, 99999),
        rf"{TENSORS}: tokens of row 0, entry 0, must be in \[0, 259\), got 99999{RERUN}"),
    Bad("token below the vocabulary", "train@uniform-1",
        set_entry(TENSORS, "prompt_tokens", 1, -1),
        rf"{TENSORS}: prompt_tokens of row 0, entry 1, must be in \[0, 259\), got -1{RERUN}"),
    Bad("steps of the table", "train@uniform-1", set_cell(TABLE, 2, "steps", 77),
        rf"{TABLE}: row 2 .*column 'steps' must be \d+, as in {TENSORS}, got 77{RERUN}"),
    Bad("two prompts in a group", "train@uniform-1", set_cell(TABLE, 4, "prompt_id", "train-no"),
        rf"{TABLE}: row 4 .*column 'group' must be of one prompt, .*{RERUN}"),
    Bad("a prompt in two groups", "train@uniform-1", set_cell(TABLE, 4, "group", 1000),
        rf"{TABLE}: row 4 .*column 'group' must be of one prompt, .*, got 1000{RERUN}"),
    Bad("negative cost of rollouts", "train@uniform-1",
        write(f"{ROLLOUTS}/cost.json", '{"flops": -5}'),
        rf"{ROLLOUTS}/cost.json: cost.flops must be a whole number >= 0, got -5{RERUN}"),
    Bad("negative cost of a policy", "train@uniform-1",
        write(f"{BASE}/state.json", '{"name": "base", "cost": {"flops": -1}}'),
        rf"{BASE}/state.json: cost.flops must be a whole number >= 0, got -1{RERUN}"),
    Bad("reward beside another outcome", "train@uniform-1",
        both(set_cell(REWARDS, 6, "outcome", 1.0), set_cell(REWARDS, 6, "reward", 0.0)),
        rf"{REWARDS}: row 6 .*'reward' must be 1.0, by its outcome .*, got 0.0; rerun its score"),
    Bad("reward of another prompt", "train@uniform-1",
        set_cell(REWARDS, 6, "prompt_id", "train-no"),
        rf"{REWARDS}: row 6 .*'prompt_id' must be .*, as it was sampled, got train-no{RERUN}"),
    Bad("reward that float32 cannot hold", "train@uniform-1", set_cell(REWARDS, 5, "reward", 1e39),
        rf"{REWARDS}: row 5 .*column 'reward' must be finite in float32, got 1e\+39{RERUN}"),
    Bad("more successes than rollouts", "curriculum@sgpo", set_cell(PROFILE, 1, "successes", 20),
        rf".*{PROFILE}: row 1 .*column 'successes' must be at most rollouts, got 20{RERUN}"),
    Bad("rate of other counts", "curriculum@sgpo",
        both(set_cell(PROFILE, 1, "successes", 2), set_cell(PROFILE, 1, "outcome_rate", 0.9)),
        rf".*{PROFILE}: row 1 .*'outcome_rate' must be successes / rollouts, got 0.9{RERUN}"),
    Bad("a million rollouts", "rollout@uniform-1", set_cell(CURRICULUM, 3, "rollouts", 10**6),
        rf"{CURRICULUM}: row \d+ .*'rollouts' must be 8, .*, got 1000000{RERUN}"),
    Bad("two prompts at one position", "rollout@uniform-1",
        edit_table(CURRICULUM, lambda frame: frame.assign(position=0)),
        rf"{CURRICULUM}: row 1 .*column 'position' must be one of 0, 1, 2 .*, got 0{RERUN}"),
    Bad("training prompts to evaluate on", "evaluate@uniform-1",
        take(EVAL, "artifacts/prompts/train.parquet"),
        rf"{EVAL}: row 0 .*column 'prompt_id' must be eval-..., got train-.*{RERUN}"),
    Bad("status beside an outcome", "train@uniform-1",
        both(set_cell(REWARDS, 2, "outcome", 1.0), set_cell(REWARDS, 2, "status", "failed")),
        rf"{REWARDS}: row 2 .*'outcome' must be 0, or 1 with the status scored, got 1.0{RERUN}"),
    Bad("score of a part above 1", "train@uniform-1",
        edit_table(REWARDS, lambda frame: frame.assign(parts="[[1, 1.5]]")),
        rf"{REWARDS}: row 0 .*'parts' must be JSON \[\[end, score\], .*1.5\]\]{RERUN}"),
    Bad("a part behind the text", "train@uniform-1",
        edit_table(REWARDS, lambda frame: frame.assign(parts="[[1, 1.0], [99, 0.5]]")),
        rf"{REWARDS}: row 0 .*'parts' must be within the \d+ characters of its text.*{RERUN}"),
    Bad("no scores of parts", "train@uniform-1",
        set_param("arms.uniform.objective", LATER_PARTS),
        rf"{REWARDS}: column 'parts' is missing{RERUN}"),
    Bad("half an outcome", "train@uniform-1", set_cell(REWARDS, 2, "outcome", 0.5),
        rf"{REWARDS}: row 2 .*'outcome' must be 0, or 1 .*, got 0.5{RERUN}"),
    Bad("a group without its first rollout", "train@uniform-1",
        edit_table(TABLE, lambda frame: frame[1:]),
        rf"{TABLE}: row 0 .*'rollout_id' must be its prompt_id with /0, /1, .*, got .*/1{RERUN}"),
    Bad("a group without its last rollout", "train@uniform-1", drop_last,
        rf"{ROLLOUTS}/summary.json: rollouts must be 127, as in its table, got 128{RERUN}"),
    Bad("text of another rollout", "train@uniform-1", set_cell(TABLE, 2, "text", "#999\n"),
        rf"{TABLE}: row 2 .*'text' must be as in {TENSORS}, got #999{RERUN}"),
    Bad("end of another rollout", "train@uniform-1",
        edit_table(TABLE, lambda frame: frame.assign(is_finished=~frame["is_finished"])),
        rf"{REWARDS}: row 0 .*|{TABLE}: row 0 .*'is_finished' must be .*{RERUN}"),
    Bad("log-probs as integers", "train@uniform-1",
        edit_tensors(TENSORS, lambda all: all | {"behavior_logp": np.zeros_like(all["tokens"])}),
        rf"{TENSORS}: behavior_logp must be one real number per entry, got int32 .*"),
    Bad("log-probs in a column", "train@uniform-1",
        edit_tensors(TENSORS, lambda all: all | {"behavior_logp": all["behavior_logp"][:, None]}),
        rf"{TENSORS}: behavior_logp must be one real number per entry, got float32 of shape .*"),
    Bad("tokens as floats", "train@uniform-1",
        edit_tensors(TENSORS, lambda all: all | {"tokens": all["tokens"].astype(np.float32)}),
        rf"{TENSORS}: tokens must be one integer number per entry, got float32 .*"),
    Bad("group of another size", "rollout@uniform-1", set_cell(CURRICULUM, 3, "rollouts", 4),
        rf"{CURRICULUM}: row \d+ .*'rollouts' must be 8, .*, got 4{RERUN}"),
    Bad("group of another rate", "rollout@sgpo-1",
        edit_table(SGPO, lambda frame: frame.assign(outcome_rate=0.0, rollouts=2)),
        rf"{SGPO}: row 0 .*'rollouts' must be \d+, as set by arms.sgpo.curriculum, got 2{RERUN}"),
    Bad("curriculum without a prompt", "rollout@uniform-1",
        edit_table(CURRICULUM, lambda frame: frame[1:]),
        rf"{CURRICULUM}: row 0 .*'position' must be one of 0, 1, 2 .*, got 1{RERUN}"),
    Bad("curriculum of another family", "rollout@uniform-1",
        set_cell(CURRICULUM, 3, "family", "alchemy"),
        rf"{CURRICULUM}: prompt_id=.*: column 'family' must be .*, got 'alchemy'{RERUN}"),
    Bad("profile without a prompt", "curriculum@sgpo",
        edit_table(PROFILE, lambda frame: frame[1:]),
        rf".*{PROFILE}: prompt_id=.* must be of family .*, as in the prompts, got None{RERUN}"),
    Bad("profile of another family", "curriculum@sgpo", set_cell(PROFILE, 1, "family", "alchemy"),
        rf".*{PROFILE}: prompt_id=.* must be of family .*, got 'alchemy'{RERUN}"),
    Bad("entry that is no object", "score@uniform-1",
        set_cell("artifacts/prompts/train.parquet", 3, "entry", "[" * 200000),
        r"artifacts/prompts/train.parquet: row 3 .*'entry' must be a JSON object, got \[+; rerun "),
    Bad("policy of another round", "evaluate@uniform-1",
        take(STATE, "artifacts/policies/sgpo-1/state.json"),
        rf"{STATE}: name must be 'uniform-1', got 'sgpo-1'; rerun"),
    Bad("updates that are no number", "evaluate@uniform-1", set_state("updates", "x"),
        rf"{STATE}: updates must be a whole number >= 0, got 'x';"),
    Bad("objective state that is no object", "evaluate@uniform-1",
        set_state("objective_state", [1]),
        rf"{STATE}: objective_state must be a JSON object, got \[1]"),
    Bad("a round without an arm", "evaluate@uniform-1", set_state("arm", None),
        rf"{STATE}: arm must be a name .*, got None"),
    Bad("cost that no float holds", "evaluate@uniform-1",
        set_state("cost", {"flops": 10**400}),
        rf"{STATE}: cost.flops must be a whole number >= 0, got 10+"),
    Bad("tokenizer of another shape", "rollout@uniform-1", write(f"{BASE}/tokenizer.json", "[1]"),
        rf"{BASE}: must be a complete policy directory, \w+: .*; rerun its stage"),
    Bad("configuration that is null", "rollout@uniform-1", write(f"{BASE}/config.json", "null"),
        rf"{BASE}: must be a complete policy directory, \w+: .*; rerun its stage"),
    Bad("nan weight", "rollout@uniform-1", set_entry(f"{BASE}/model.safetensors", NORM, 3, np.nan),
        rf"{BASE}: tensor '{NORM}' must be finite, got nan at \[3\]{RERUN}"),
]  # fmt: skip
DIVERGING = [
    Bad("learning rate of an arm", "train@uniform-1", set_param(LEARNING_RATE, 1e30),
        rf"training of uniform-1 diverged at update 0: norm of the weights is inf{LOWER}"),
    Bad("learning rate of an arm in two ranks", "train@uniform-1",
        both(set_param(LEARNING_RATE, 1e30), set_param("arms.uniform.training.ranks", 2)),
        rf"training of uniform-1 diverged at update 0: norm of the weights is inf{LOWER}"),
    Bad("learning rate of the warm-up", "base",
        set_param("policy.base.warmup.learning_rate", 1e30),
        r"warm-up of the base diverged at update 0: .*; lower policy.base.warmup.learning_rate"),
]  # fmt: skip


COMMON = {
    *("behavior log-prob of nan", "steps of the table", "reward beside another outcome"),
    *("more successes than rollouts", "training prompts to evaluate on", "group of another size"),
    *("text of another rollout", "policy of another round", "entry that is no object"),
    *("cost that no float holds", "nan weight", "score of a part above 1", "tokens as floats"),
    *("a group without its first rollout", "token outside the vocabulary"),
}


@pytest.mark.parametrize("bad", cases(EDITED, COMMON))
def test_an_edited_artifact_is_refused_with_row_and_column(workspace: Path, bad: Bad):
    bad.corrupt(workspace)
    refuses(workspace, bad)


@pytest.mark.parametrize("bad", cases(DIVERGING, {"learning rate of an arm"}))
def test_training_that_diverges_is_one_line_and_leaves_its_curves(workspace: Path, bad: Bad):
    bad.corrupt(workspace)
    refuses(workspace, bad)
    reason = (workspace / ".runs/diverged" / bad.stage / "reason.json").read_text()
    assert "diverged at update 0" in reason
    assert (workspace / ".runs/diverged" / bad.stage / "updates.csv").is_file()
