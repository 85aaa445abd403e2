"""First answers: which groups revise them, what they see, and what a revision improves."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.allocation.selection import (
    Selection,
    compose,
    resample_uniform_groups,
    revise_first_answers,
)
from grpo.errors import ArtifactError, ParameterError
from grpo.modalities.tokens.policy import TokenPolicy
from grpo.rewards.base import Task
from grpo.runtime.artifacts.tables import ROLLOUTS, validate
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.drawing import sampling_skill
from grpo.sampling.judging import TextJudge
from grpo.sampling.revision import sample_first_answers
from grpo.sampling.rollouts import SampledBatch, read_batch
from grpo.sampling.round_rollouts import draw_round, executor_source
from grpo.sampling.scoring import judging_skill
from grpo.sampling.shaping import Shaping, Share, improvements
from grpo.types import Cost
from tests.modalities.tiny import tiny_policy

CANDIDATES = pd.DataFrame(
    {
        "prompt_id": [f"p{each}" for each in range(10)],
        "family": "f",
        "prompt": [f"{'ab' * (each % 4)}{each}=" for each in range(10)],
        "answer": "",
        "entry": "{}",
        "rollouts": [4, 2] * 5,
    }
)
TEMPLATE = "[{answer}]"
REVISE = revise_first_answers("grade", share=1.0, template=TEMPLATE)


@cache
def policy_of() -> TokenPolicy:
    """Returns a tiny policy that ends at every fifth token, so that many answers are finished."""
    policy = tiny_policy()
    policy.end_tokens = torch.arange(0, 256, 5)
    return policy


def grade(answer: str, task: Task) -> float:
    """Scores a text; about half of what a random model writes has no score."""
    first = ord(answer[0]) if answer else 0
    if first % 2:
        raise ValueError("odd")
    return first % 8 / 8


def refuse(answer: str, task: Task) -> float:
    raise ValueError("malformed")


def draw(scratch: Path, selection: Selection, judge=grade, seed: int = 0) -> SampledBatch:
    """Draws a round from a tiny policy."""
    policy = policy_of()
    judges = {
        "outcome": TextJudge(lambda answer, task: 1.0, answer_pattern="^(.)", timeout_seconds=5.0),
        "grade": TextJudge(judge, answer_pattern="(?s)^(.*)$", timeout_seconds=5.0),
    }
    shares = tuple(Share(judge=name, weight=1.0, normalize="none") for name in judges)
    skills = {
        "draw": sampling_skill(lambda: policy, {"sampled": policy.decoding}),
        "judge": judging_skill(judges, CANDIDATES.drop(columns="rollouts")),
    }
    source = executor_source(
        Local(Work(skills)),
        layout=policy.layout,
        shaping=Shaping(shares=shares, threshold=0.5, maximize="outcome", unfinished_penalty=0.0),
        rollouts_per_batch=4,
        profile=None,
        progress=lambda done, total: None,
        revision=selection.revision,
    )
    return draw_round(selection, CANDIDATES, {}, source=source, seed=seed, scratch=scratch).batch


def first_of(batch: SampledBatch) -> pd.DataFrame:
    """Returns the first row of each group by prompt."""
    return batch.table.groupby("prompt_id").first()


def asked(batch: SampledBatch) -> dict[str, str]:
    """Returns the prompt that each group was sampled from, by prompt_id."""
    policy = policy_of()
    group = torch.tensor(batch.table["group"].to_numpy())
    trajectory, _ = policy.unpack(batch.tensors, group)
    texts = policy.tokenizer.batch_decode(
        [row[mask] for row, mask in zip(trajectory.prompt, trajectory.prompt_mask)],
        skip_special_tokens=True,
    )
    return dict(zip(batch.table["prompt_id"], (texts[each] for each in trajectory.group)))


def test_a_group_sees_the_prompt_and_its_first_answer_where_that_has_a_score(tmp_path: Path):
    batch = draw(tmp_path, REVISE)
    first, found = first_of(batch), asked(batch)
    texts = CANDIDATES.set_index("prompt_id")["prompt"]
    assert 0 < first["first_score"].notna().sum() < len(first)
    assert first["first_answer"].notna().all()
    for each, row in first.iterrows():
        more = f"[{row['first_answer']}]" if pd.notna(row["first_score"]) else ""
        assert found[each] == texts[each] + more
    assert batch.table.groupby("prompt_id").size().to_dict() == (
        CANDIDATES.set_index("prompt_id")["rollouts"].to_dict()
    )


def test_where_every_first_answer_is_malformed_it_is_the_plain_round_to_the_byte(tmp_path: Path):
    plain = draw(tmp_path / "a", Selection())
    revised = draw(tmp_path / "b", REVISE, refuse)
    assert revised.table["first_score"].isna().all()
    pd.testing.assert_frame_equal(revised.table[[*plain.table]], plain.table)
    for name, tensor in plain.tensors.items():
        assert torch.equal(revised.tensors[name], tensor)


def crash(answer: str, task: Task) -> float:
    raise RuntimeError("out of order")


def test_what_judges_said_of_first_answers_holds_after_an_interruption(tmp_path: Path):
    """A mended judge would ask for revisions, beside stored groups of the plain prompts."""
    whole = draw(tmp_path, REVISE, crash)
    assert whole.table["first_score"].isna().all()
    for batch in sorted(tmp_path.glob("batch-*"))[1:]:
        shutil.rmtree(batch)
    pd.testing.assert_frame_equal(draw(tmp_path, REVISE, grade).table, whole.table)


def test_first_answers_count_in_the_cost(tmp_path: Path):
    """One rollout more per prompt, so the steps of the groups plus those of the first answers."""
    batch = draw(tmp_path, REVISE, refuse)
    first = [read_batch(each) for each in sorted((tmp_path / "first").glob("batch-*"))]
    groups = draw(tmp_path / "plain", Selection()).cost
    assert sum(len(each.table) for each in first) == len(CANDIDATES)
    assert batch.cost == sum((each.cost for each in first), groups)


@pytest.mark.parametrize("share", [0.3, pytest.param(0.8, marks=pytest.mark.long)])
def test_a_share_of_the_groups_revises(tmp_path: Path, share: float):
    selection = revise_first_answers("grade", share=share, template=TEMPLATE)
    chosen = first_of(draw(tmp_path / "a", selection))["first_answer"].notna()
    assert chosen.sum() == round(share * len(CANDIDATES))
    other = first_of(draw(tmp_path / "b", selection, seed=1))["first_answer"].notna()
    assert (chosen != other).any()


def test_a_share_of_small_draws_revises_on_average(tmp_path: Path):
    """Draws of one prompt revise with a chance of `share`: within 4 standard errors."""
    revision = revise_first_answers("grade", share=0.1, template=TEMPLATE).revision
    assert revision is not None

    class Asked(Exception):
        pass

    def sample(prompts: pd.DataFrame) -> SampledBatch:
        raise Asked

    count, draws = 0, 2000
    for seed in range(draws):
        try:
            first = sample_first_answers(
                CANDIDATES[:1], revision, sample=sample, judge=pd.DataFrame, seed=seed
            )
            assert first.table.empty
            assert first.cost == Cost()
        except Asked:
            count += 1
    assert abs(count / draws - 0.1) < 4 * (0.1 * 0.9 / draws) ** 0.5


def test_draws_without_a_first_answer_are_those_of_the_prompts(tmp_path: Path):
    revised = draw(
        tmp_path / "a",
        compose(revise_first_answers("grade", share=0.01), resample_uniform_groups(3, 3, 1)),
    )
    plain = draw(tmp_path / "b", resample_uniform_groups(3, 3, 1))
    assert revised.table["first_answer"].isna().all()
    pd.testing.assert_frame_equal(revised.table[[*plain.table]], plain.table)


def test_a_round_that_is_drawn_again_is_the_same_and_comes_back_from_disk(tmp_path: Path):
    selection = compose(REVISE, resample_uniform_groups(3, 3, 3))
    found = [draw(tmp_path / "scratch", selection) for _ in range(2)]
    pd.testing.assert_frame_equal(found[0].table, found[1].table)
    assert found[0].cost == found[1].cost
    assert set(asked(found[0])) == set(found[0].table["prompt_id"])


def test_rollouts_with_first_answers_come_back_and_edited_ones_are_refused(tmp_path: Path):
    batch = draw(tmp_path / "scratch", REVISE)
    for values in ({}, {"first_answer": None, "first_score": np.nan}):  # some, none
        table = batch.table.assign(**values)
        pd.testing.assert_frame_equal(
            validate(table, ROLLOUTS, Path("t")), table, check_dtype=False
        )
    scores = batch.table["first_score"].to_numpy(copy=True)
    scores[1] = 0.123
    for broken in ({"first_score": scores}, {"first_score": 0.5, "first_answer": None}):
        with pytest.raises(ArtifactError, match="'first_score' must be that of its group"):
            validate(batch.table.assign(**broken), ROLLOUTS, Path("t"))


@settings(deadline=None, max_examples=40)
@given(first=st.floats(0, 1), scores=st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_an_improvement_is_the_share_of_the_error_that_is_removed(
    first: float, scores: list[float]
):
    rollouts = pd.DataFrame({"first_score": [first] * len(scores)})
    found = improvements(rollouts, pd.DataFrame({"score.grade": scores}), "grade")
    assert ((found >= 0) & (found <= 1)).all()
    for score, each in zip(scores, found):
        if first == 1 or score <= first:
            assert each == 0
        else:
            assert (1 - first) * (1 - each) == pytest.approx(1 - score, abs=1e-9)


def test_without_a_first_answer_nothing_is_improved():
    rollouts = pd.DataFrame({"first_score": [np.nan, np.nan]})
    assert improvements(rollouts, pd.DataFrame({"score.g": [0.0, 1.0]}), "g").tolist() == [0, 0]


@pytest.mark.parametrize(
    "settings",
    [{"share": 0.0}, {"share": 1.5}, {"template": "no place"}],
)
def test_wrong_settings_are_refused(settings: dict[str, object]):
    with pytest.raises(ParameterError, match=rf"revise_first_answers\.{next(iter(settings))} must"):
        revise_first_answers("grade", **settings)
