"""Rollouts that were not judged: no statistic of training sees them, wherever tables are joined."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.allocation.profiling import profile_prompts
from grpo.allocation.selection import VISITS, learn_round, mixed_prompts, skip_uniform_prompts
from grpo.errors import ArtifactError
from grpo.params.parameters import read_params
from grpo.rewards.base import Task
from grpo.rewards.simulator import read_verdict
from grpo.runtime.artifacts.tables import REWARDS, is_judged, write_table
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.drawing import local_executor, sample_rollouts, sampling_skill, stored_batches
from grpo.sampling.judging import TextJudge
from grpo.sampling.rollouts import (
    SampledBatch,
    keep_judged,
    number_anew,
    read_batch,
    write_batch,
    write_rollouts,
)
from grpo.sampling.round_rollouts import executor_source, take_rollouts
from grpo.sampling.scoring import judge_rollouts, judging_skill
from grpo.wiring.iterations import read_trainable_rollouts
from grpo.wiring.shaping import build_shaping
from tests.modalities.tiny import tiny_policy
from tests.rewards.rules import rule_with
from tests.sampling.test_rollout import CANDIDATES

FEW = settings(max_examples=25, deadline=None)
SMOKE = Path(__file__).parents[2] / "recipes/smoke.yaml"
SHAPING = replace(build_shaping(read_params(SMOKE)), maximize="score")  # any reward fits
OUTCOMES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1), min_size=1
)


def tables(outcomes: dict[str, list[float | None]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns rollouts and rewards; None was not judged."""
    rows = [(f"{p}/{n}", p, each) for p, group in outcomes.items() for n, each in enumerate(group)]
    table = pd.DataFrame(rows, columns=["rollout_id", "prompt_id", "outcome"])
    status = np.where(table["outcome"].isna(), "failed", "scored")
    rewards = table.assign(outcome=table["outcome"].fillna(0.0), status=status)
    return table.drop(columns="outcome").assign(steps=range(1, len(table) + 1)), rewards


def without_none(outcomes: dict[str, list[float | None]]) -> dict[str, list[float]]:
    kept = {p: [each for each in group if each is not None] for p, group in outcomes.items()}
    return {prompt: group for prompt, group in kept.items() if group}


@given(outcomes=OUTCOMES)
@FEW
def test_difficulty_is_that_of_the_judged_rollouts(outcomes: dict[str, list[float | None]]):
    rollouts, rewards = tables(outcomes)
    prompts = pd.DataFrame({"prompt_id": list("abcd"), "family": "f"})
    profile = profile_prompts(rollouts, rewards, prompts).set_index("prompt_id")
    judged = without_none(outcomes)
    assert set(profile.index) == set("abcd")
    unknown = profile[~profile.index.isin(judged)]
    assert (unknown[["rollouts", "successes"]] == 0).all(axis=None)
    assert unknown[["outcome_rate", "mean_steps"]].isna().all(axis=None)
    for prompt, group in judged.items():
        steps = rollouts.loc[(rollouts["prompt_id"] == prompt) & is_judged(rewards), "steps"]
        row = profile.loc[prompt]
        assert (row["rollouts"], row["successes"]) == (len(group), sum(group))
        assert row["outcome_rate"] == sum(group) / len(group)
        assert row["mean_steps"] == steps.mean()


@given(outcomes=OUTCOMES)
@FEW
def test_a_prompt_is_mixed_by_its_judged_rollouts(outcomes: dict[str, list[float | None]]):
    _, rewards = tables(outcomes)
    expected = {p for p, group in without_none(outcomes).items() if set(group) == {0.0, 1.0}}
    assert mixed_prompts(rewards[is_judged(rewards)]) == expected


@given(outcomes=OUTCOMES)
@FEW
def test_a_prompt_with_one_judged_rollout_is_visited_and_keeps_its_streak(
    outcomes: dict[str, list[float | None]],
):
    _, rewards = tables(outcomes)
    selection = skip_uniform_prompts(prompts=4)
    before = {"easy_streak": {"a": 2, "b": 1}, VISITS: {"a": 5}}
    judged = without_none(outcomes)
    after = learn_round(
        selection,
        before,
        rewards[is_judged(rewards)].assign(steps=1),
        sorted(set(outcomes) - set(judged)),
    )
    for prompt in outcomes:
        assert after[VISITS][prompt] == before[VISITS].get(prompt, 0) + 1
    compared = {prompt: group for prompt, group in judged.items() if len(group) > 1}
    for prompt in "abcd":
        old = before["easy_streak"].get(prompt, 0)
        group = compared.get(prompt)
        expected = old if group is None else (old + 1 if all(group) else 0)
        assert after["easy_streak"].get(prompt, 0) == expected


@cache
def sampled() -> SampledBatch:
    """Returns 36 rollouts of 12 prompts, of different lengths."""
    return sample_rollouts(
        local_executor(tiny_policy()),
        CANDIDATES,
        rollouts_per_batch=64,
        seed=3,
        scratch=Path(".scratch"),
    )


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("work"))


def rewards_of(batch: SampledBatch, failed: set[int]) -> pd.DataFrame:
    rows = range(len(batch.table))
    frame = batch.table[["rollout_id", "prompt_id"]].assign(
        outcome=[float(row % 2 and row not in failed) for row in rows],
        reward=[float(row % 3) for row in rows],
        status=["failed" if row in failed else "scored" for row in rows],
        detail="",
    )
    return frame.sample(frac=1, random_state=0)  # rewards may stand in another order


@given(failed=st.sets(st.integers(0, 35), max_size=34))
@settings(max_examples=8, deadline=None)
def test_a_round_is_read_as_if_what_was_not_judged_had_not_been_drawn(failed: set[int]):
    """Tokens, log-probs, widths and rewards; the cost and the visits stay."""
    batch, policy = sampled(), tiny_policy()
    directory = Path("round")
    write_rollouts(directory, batch)
    rewards = rewards_of(batch, failed)
    write_table(rewards, Path("rewards.parquet"), REWARDS)
    found = read_trainable_rollouts(policy.layout, directory, Path("rewards.parquet"), SHAPING)
    kept = [row for row in range(len(batch.table)) if row not in failed]
    assert found.sampled.cost == batch.cost
    pd.testing.assert_frame_equal(
        found.sampled.table, batch.table.iloc[kept].reset_index(drop=True)
    )
    assert found.rewards["reward"].tolist() == [float(row % 3) for row in kept]
    assert set(found.passed) == set(batch.table["prompt_id"]) - {
        *batch.table["prompt_id"].iloc[kept]
    }
    whole, whole_logp = policy.unpack(batch.tensors, torch.tensor(batch.table["group"].to_numpy()))
    part, logp = policy.unpack(
        found.sampled.tensors, torch.tensor(found.sampled.table["group"].to_numpy())
    )
    width = int(whole.mask[kept].sum(dim=1).max())
    assert part.mask.shape[1] == width
    assert torch.equal(part.mask, whole.mask[kept][:, :width])
    assert torch.equal(logp, whole_logp[kept][:, :width])
    assert policy.decode(part) == found.sampled.table["text"].tolist()


def test_a_round_of_which_nothing_was_judged_is_refused_with_the_first_reason():
    batch = sampled()
    write_rollouts(Path("round"), batch)
    rewards = rewards_of(batch, set(range(36))).assign(detail="RuntimeError: it failed")
    write_table(rewards, Path("rewards.parquet"), REWARDS)
    with pytest.raises(ArtifactError, match=r"none of 36 does; the first is p.* it failed"):
        read_trainable_rollouts(
            tiny_policy().layout, Path("round"), Path("rewards.parquet"), SHAPING
        )


@given(failed=st.sets(st.integers(0, 35), max_size=20))
@FEW
def test_the_profiles_rollouts_are_reused_as_if_only_judged_ones_had_been_drawn(failed: set[int]):
    batch, layout = sampled(), tiny_policy().layout
    stored = keep_judged(layout, batch, rewards_of(batch, failed))
    kept = batch.table.drop(index=list(failed))
    asked = CANDIDATES[CANDIDATES["prompt_id"].isin(kept["prompt_id"])].assign(rollouts=2)
    taken = take_rollouts(layout, stored, asked).table
    expected = kept.groupby("prompt_id").head(2)
    assert sorted(taken["rollout_id"]) == sorted(expected["rollout_id"])


@pytest.mark.parametrize("failed", [{0}, {1, 5}, {2, 3, 4}])
def test_a_profile_with_rollouts_that_were_not_judged_can_be_stored_and_reused(failed: set[int]):
    """Both tables require ids without a gap."""
    batch, layout = sampled(), tiny_policy().layout
    judged = keep_judged(layout, batch, rewards_of(batch, failed))
    write_batch(Path("profile"), number_anew(judged))
    stored = read_batch(Path("profile"))
    assert stored.table["text"].tolist() == judged.table["text"].tolist()
    asked = CANDIDATES[CANDIDATES["prompt_id"].isin(stored.table["prompt_id"])].assign(rollouts=1)
    write_rollouts(Path("round"), take_rollouts(layout, stored, asked))


def test_what_decides_in_sampling_is_what_was_judged(tmp_path: Path):
    """Dynamic sampling gets no outcome of a text on which the judge fails."""

    def judge(answer: str, task: Task) -> float:
        if answer and ord(answer) % 3 == 0:
            raise KeyError("a judge's own bug")
        return 1.0

    rule = rule_with(TextJudge(judge, answer_pattern="^(.)", timeout_seconds=5.0))
    policy = tiny_policy()
    skills = {
        "draw": sampling_skill(lambda: policy, {"sampled": policy.decoding}),
        "judge": judging_skill(rule.judges, CANDIDATES.drop(columns="rollouts")),
    }
    source = executor_source(
        Local(Work(skills)),
        layout=policy.layout,
        shaping=rule.shaping,
        rollouts_per_batch=16,
        profile=None,
        progress=lambda done, total: None,
    )
    drawn = source.draw(CANDIDATES, 0, tmp_path)
    assert stored_batches(tmp_path)
    first = drawn.table.set_index("rollout_id")["text"].str.strip().str[:1]
    failed = {name for name, text in first.items() if text and ord(text) % 3 == 0}
    assert 0 < len(failed) < len(first)
    rewards = source.judge(tmp_path)
    assert set(rewards.loc[is_judged(rewards), "rollout_id"]) == set(first.index) - failed


@pytest.mark.parametrize("ending", ["failed after 3 steps", "timed out after 0 steps"])
def test_a_scene_without_a_verdict_was_not_judged(ending: str):
    """A simulator that does not answer says nothing of the policy, as one that raises."""
    task = Task(family="f", prompt="p", answer="", entry={})
    assert [read_verdict(each, task) for each in ("success after 1 steps", "no success")] == [1, 0]
    with pytest.raises(RuntimeError, match=ending):
        read_verdict(ending, task)


def test_a_text_without_steps_was_not_judged_and_an_empty_one_was():
    """An end token at once is a step of the policy's own."""
    rollouts = pd.DataFrame(
        {
            "rollout_id": ["a", "b"],
            "prompt_id": "p0",
            "text": "",
            "steps": [0, 1],
            "is_finished": True,
        }
    )
    rule = rule_with(
        TextJudge(lambda answer, task: 1.0, answer_pattern="^(.)", timeout_seconds=5.0)
    )
    rewards = judge_rollouts(rollouts, CANDIDATES, rule).rewards
    assert Counter(rewards["status"]) == Counter(["failed", "unparsable"])
    assert rewards["detail"].tolist() == ["the sampler returned no step", ""]
