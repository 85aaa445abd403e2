"""Rollouts of held-out prompts: the same draws and the same choice of samples for every policy."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from grpo.errors import ServerError
from grpo.modalities.tokens.policy import Decoding
from grpo.rewards.base import View
from grpo.runtime.artifacts.files import Scratch
from grpo.runtime.artifacts.tables import EVALUATION_SAMPLES, SCORE, write_table
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.drawing import sampling_skill
from grpo.sampling.evaluation import evaluate_prompts
from grpo.sampling.evaluation_rollouts import (
    CHOSEN_PROMPTS,
    CHOSEN_ROLLOUTS,
    choose_samples,
    draw_evaluation,
    require_all_judged,
    with_first_rollouts,
)
from grpo.sampling.judging import JointJudge, TextJudge
from grpo.sampling.rollouts import SampledBatch
from grpo.sampling.scoring import RewardRule, judge_rollouts
from grpo.types import Cost
from tests.modalities.tiny import tiny_policy
from tests.rewards.rules import rule_with

RULE = rule_with(
    TextJudge(
        lambda answer, task: float(len(answer)) / 10,
        answer_pattern="(.+)",
        timeout_seconds=5.0,
    ),
    unfinished_penalty=0.25,
)
PLAIN = replace(RULE, shaping=RULE.shaping.without_shaping())


def prompts_of(families: int, per_family: int) -> pd.DataFrame:
    """Returns prompts whose order is not that of their families."""
    rows = [
        {"prompt_id": f"e{i}-{f}", "family": f"f{f:02d}", "prompt": "1+1=", "answer": "2"}
        for i in range(per_family)
        for f in range(families)
    ]
    return pd.DataFrame(rows).assign(entry="{}")


def batch_of(prompts: pd.DataFrame, text: str, *, rollouts: int = 6) -> SampledBatch:
    """Returns text rollouts of all prompts, the prompts from last to first."""
    repeated = prompts.iloc[::-1].loc[lambda rows: rows.index.repeat(rollouts)]
    member = repeated.groupby("prompt_id").cumcount().astype(str)
    table = pd.DataFrame(
        {
            "rollout_id": repeated["prompt_id"] + "/" + member,
            "prompt_id": repeated["prompt_id"],
            "group": repeated.index.to_numpy(),
            "text": text + member,
            "steps": 1,
            "is_finished": False,
        }
    ).reset_index(drop=True)
    return SampledBatch(table=table, tensors={}, cost=Cost())


def samples_of(prompts: pd.DataFrame, batch: SampledBatch, rule: RewardRule) -> pd.DataFrame:
    media = None if batch.media is None else batch.media.numpy()
    judged = judge_rollouts(batch.table, prompts, rule, media=media)
    return choose_samples(prompts, {"sampled": batch}, {"sampled": judged})


def test_the_first_rollout_of_every_prompt_is_kept_with_what_the_judge_read():
    prompts = prompts_of(2, 3)
    batch = batch_of(prompts, "aaaaaa")
    judged = {"sampled": judge_rollouts(batch.table, prompts, RULE, media=None)}
    greedy = judged["sampled"].rewards.groupby("prompt_id").head(1)
    evaluated = evaluate_prompts(prompts, judged["sampled"].rewards, greedy)
    kept = with_first_rollouts(evaluated, {"sampled": batch}, judged)
    assert kept["prompt_id"].tolist() == sorted(prompts["prompt_id"])
    assert set(kept["first_text"]) == {"aaaaaa0"}
    assert set(kept["first_outcome"]) == {1.0}


@pytest.mark.parametrize(
    ("families", "per_family", "chosen_per_family"),
    [(1, 20, 12), (1, 5, 5), (5, 20, 2), (6, 20, 2), (20, 3, 1)],
)
def test_families_have_equally_many_prompts_and_not_too_many(
    families: int, per_family: int, chosen_per_family: int
):
    prompts = prompts_of(families, per_family)
    samples = samples_of(prompts, batch_of(prompts, "a"), RULE)
    by_family = samples.groupby("family")["prompt_id"].nunique()
    assert set(by_family) == {chosen_per_family}
    assert by_family.sum() == min(CHOSEN_PROMPTS, families * chosen_per_family)
    first = sorted(prompts.loc[prompts["family"] == "f00", "prompt_id"])[:chosen_per_family]
    assert samples.loc[samples["family"] == "f00", "prompt_id"].unique().tolist() == first
    members = samples.groupby("prompt_id")["rollout_id"].agg(list)
    for prompt, found in members.items():
        assert found == [f"{prompt}/{i}" for i in range(CHOSEN_ROLLOUTS)]


def test_every_policy_has_the_same_samples_however_good_it_is():
    prompts = prompts_of(3, 4)
    worse, better = (samples_of(prompts, batch_of(prompts, each), RULE) for each in ("a", "aaaaaa"))
    same = ["rollout_id", "prompt_id", "family", "prompt"]
    pd.testing.assert_frame_equal(worse[same], better[same])
    assert (worse["outcome"].mean(), better["outcome"].mean()) == (0.0, 1.0)
    assert better["text"].tolist()[:2] == ["aaaaaa0", "aaaaaa1"]


def test_each_mode_must_have_a_judged_rollout_and_warns_of_its_own_unjudged_ones():
    prompts = prompts_of(2, 3)
    judged = judge_rollouts(batch_of(prompts, "a").table, prompts, PLAIN)
    row = np.arange(len(judged.rewards))
    some, all_ = (
        judged._replace(rewards=judged.rewards.assign(status=np.where(of, "unanswered", "scored")))
        for of in (row == 0, row >= 0)
    )
    assert require_all_judged({"greedy": judged, "sampled": judged}) == []
    (said,) = require_all_judged({"greedy": some, "sampled": judged})
    assert said.startswith(f"greedy: {len(row) - 1} scored, 1 unanswered of {len(row)} rollouts")
    with pytest.raises(ServerError, match=r"^greedy: no rollout was judged"):
        require_all_judged({"greedy": all_, "sampled": judged})


def test_without_shaping_the_reward_is_what_the_judge_gave():
    prompts = prompts_of(1, 1)
    batch = batch_of(prompts, "aaaaaa")  # seven characters, cut at the step limit
    assert samples_of(prompts, batch, RULE)["reward"].tolist() == [0.75] * CHOSEN_ROLLOUTS
    plain = samples_of(prompts, batch, PLAIN)
    assert plain["reward"].tolist() == [0.7] * CHOSEN_ROLLOUTS
    assert plain["outcome"].tolist() == [1.0] * CHOSEN_ROLLOUTS
    assert SCORE + "judge" not in plain
    maximized = replace(RULE, shaping=replace(RULE.shaping, maximize="score"))
    scored = replace(RULE, shaping=maximized.shaping.without_shaping())
    assert samples_of(prompts, batch, scored)[SCORE + "judge"].tolist() == [0.7] * CHOSEN_ROLLOUTS


def test_each_sample_has_the_image_of_its_rollout_and_the_same_bytes_twice(tmp_path: Path):
    prompts = prompts_of(2, 3)
    batch = batch_of(prompts, "")
    count = len(batch.table)
    media = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 3)
    drawn = SampledBatch(table=batch.table, tensors={"media": media.clone()}, cost=Cost())
    shown: list[int] = []

    def view(images: np.ndarray, tasks: object) -> list[View]:
        shown.extend(int(each.max()) for each in images)
        return [View(str(each.max()), 0.5) for each in images]

    rule = replace(PLAIN, judges={"judge": JointJudge(view=view, reads_media=True)})
    samples_of(prompts, drawn, rule)
    assert shown == list(range(count))  # each image once
    for name in ("a", "b"):
        write_table(samples_of(prompts, drawn, rule), tmp_path / name, EVALUATION_SAMPLES)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    row_of = {rollout: row for row, rollout in enumerate(batch.table["rollout_id"])}
    for each in samples_of(prompts, drawn, rule).to_dict("records"):
        pixels = np.asarray(Image.open(io.BytesIO(each["image"])))
        assert pixels.tolist() == [[row_of[each["rollout_id"]]] * 3] * 2
        assert each["text"] == str(row_of[each["rollout_id"]])  # what was read off the image


def test_draws_are_those_of_the_seed_and_greedy_draws_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    prompts, policy = prompts_of(2, 2), tiny_policy()
    draws = {
        "greedy": Decoding(temperature=0.0, max_steps=4),
        "sampled": Decoding(temperature=1.0, max_steps=4),
    }

    def draw(fingerprint: str) -> dict[str, SampledBatch]:
        return draw_evaluation(
            Local(Work({"draw": sampling_skill(lambda: policy, draws)})),
            prompts,
            draws=draws,
            rollouts_per_prompt=3,
            rollouts_per_batch=6,
            seed=0,
            scratch=Scratch("evaluate", fingerprint),
            progress=lambda done, total: None,
        )

    first, second = draw("a"), draw("b")
    assert [len(first[kind].table) for kind in ("greedy", "sampled")] == [4, 12]
    for kind, batch in first.items():
        pd.testing.assert_frame_equal(batch.table, second[kind].table)
