"""Drawing a round: groups sampled until enough are mixed, and the profile's rollouts reused."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from grpo.allocation.selection import (
    Selection,
    compose,
    resample_uniform_groups,
    reuse_profile_rollouts,
    skip_uniform_prompts,
    visit_prompts,
)
from grpo.errors import ArtifactError, ServerError
from grpo.modalities.shared.packed import select_packed
from grpo.rewards.base import Task
from grpo.runtime.artifacts.files import read_json
from grpo.runtime.artifacts.tables import ROLLOUTS, write_table
from grpo.runtime.executors.base import Local, Work
from grpo.sampling.drawing import local_executor, sample_rollouts, sampling_skill
from grpo.sampling.judging import TextJudge
from grpo.sampling.rollouts import SampledBatch, read_batch, read_passed, write_batch
from grpo.sampling.round_rollouts import (
    DrawnRound,
    Source,
    draw_round,
    executor_source,
    write_round,
)
from grpo.sampling.scoring import RewardRule, judging_skill
from grpo.types import Cost
from tests.modalities.tiny import seeded, tiny_moe, tiny_policy
from tests.rewards.rules import rule_with

CANDIDATES = pd.DataFrame(
    {
        "prompt_id": [f"p{each}" for each in range(12)],
        "family": "f",
        "prompt": [f"{'ab' * (each % 4)}{each}=" for each in range(12)],
        "answer": "",
        "entry": "{}",
        "rollouts": [4, 2, 3] * 4,
    }
)
RESAMPLE = resample_uniform_groups(prompts=4, prompts_per_batch=3, max_batches=4)


policy_of = cache(tiny_policy)


class Interrupted(Exception):
    """What a kill is to one process."""


def score(answer: str, task: Task) -> float:
    """Judges about a quarter of what a random model writes as solved."""
    return float(ord(answer) % 4 == 0) if answer else 0.0


def rule() -> RewardRule:
    judge = TextJudge(score, answer_pattern="^(.)", timeout_seconds=5.0)
    return rule_with(judge, unfinished_penalty=0.5)


def draw(
    scratch: Path,
    selection: Selection = RESAMPLE,
    *,
    profile: Path | None = None,
    stop_at: int | None = None,
    seed: int = 0,
) -> DrawnRound:
    """Draws a round from a tiny policy; `stop_at`: interrupted before that batch."""
    batches = 0

    def progress(done: int, total: int) -> None:
        nonlocal batches
        batches += 1
        if batches == stop_at:
            raise Interrupted

    policy = policy_of()
    skills = {
        "draw": sampling_skill(lambda: policy, {"sampled": policy.decoding}),
        "judge": judging_skill(rule().judges, CANDIDATES.drop(columns="rollouts")),
    }
    source = executor_source(
        Local(Work(skills)),
        layout=policy.layout,
        shaping=rule().shaping,
        rollouts_per_batch=4,
        profile=profile,
        progress=progress,
    )
    return draw_round(selection, CANDIDATES, {}, source=source, seed=seed, scratch=scratch)


def write_profile(directory: Path, rollouts: int = 4) -> SampledBatch:
    batch = sample_rollouts(
        local_executor(policy_of()),
        CANDIDATES.assign(rollouts=rollouts),
        rollouts_per_batch=16,
        seed=7,
        scratch=directory / "scratch",
    )
    write_batch(directory, batch)
    return batch


def is_mixed(table: pd.DataFrame) -> pd.Series:
    outcome = table["text"].map(lambda text: score(text[:1].strip(), None))
    groups = outcome.groupby(table["prompt_id"])
    return groups.min() < groups.max()


def coins(rate: float, seed: int = 0) -> Source:
    """Returns a source of pairs whose outcomes are fair with probability `rate`, else equal."""
    chooser = np.random.default_rng(seed)
    drawn: dict[Path, pd.DataFrame] = {}

    def flip(prompts: pd.DataFrame, seed: int, scratch: Path) -> SampledBatch:
        mixed = chooser.random(len(prompts)) < rate
        table = pd.DataFrame({"prompt_id": prompts["prompt_id"].repeat(2), "group": 0})
        table = table.assign(status="scored", rollout_id="r", detail="")
        table["outcome"] = np.stack([np.ones(len(prompts)), 1.0 - mixed], axis=1).ravel()
        drawn[scratch] = table
        return SampledBatch(table=table, tensors={}, cost=Cost(sampled_steps=2 * len(prompts)))

    def keep(batch: SampledBatch, prompts: set[str]) -> SampledBatch:
        kept = batch.table["prompt_id"].isin(prompts)
        return SampledBatch(table=batch.table[kept], tensors={}, cost=batch.cost)

    return Source(flip, drawn.__getitem__, keep)


@pytest.fixture(scope="module")
def resampled(tmp_path_factory: pytest.TempPathFactory) -> DrawnRound:
    """Returns a round that was left alone."""
    return draw(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.9])
def test_a_mixed_group_takes_one_over_its_probability_of_samples(tmp_path: Path, rate: float):
    """E[sampled] = E[found] / P(mixed), by Wald; the last batch adds less than its size."""
    wanted, size = 300, 20
    pool = pd.DataFrame({"prompt_id": [f"p{each}" for each in range(2000)]})
    drawn = draw_round(
        resample_uniform_groups(prompts=wanted, prompts_per_batch=size, max_batches=100),
        pool,
        {},
        source=coins(rate),
        seed=0,
        scratch=tmp_path,
    )
    counts = drawn.counts
    error = np.sqrt((1 - rate) / wanted) / rate  # of the mean of `wanted` geometric counts
    assert counts.kept == wanted
    assert abs(counts.oversampling_factor - 1 / rate) <= 4 * error + size / wanted
    assert drawn.batch.cost.sampled_steps == 2 * counts.sampled  # dropped ones too
    assert len(drawn.passed) == counts.sampled - counts.kept


def test_resampling_is_bounded_and_leaves_something_to_store(tmp_path: Path):
    pool = pd.DataFrame({"prompt_id": [f"p{each}" for each in range(100)]})
    bounded = resample_uniform_groups(prompts=6, prompts_per_batch=4, max_batches=3)
    drawn = draw_round(bounded, pool, {}, source=coins(0.0), seed=0, scratch=tmp_path)
    assert (drawn.counts.sampled, drawn.counts.batches, drawn.counts.kept) == (12, 3, 6)
    assert drawn.batch.cost.sampled_steps == 24


@pytest.mark.parametrize("judged", [0, 1])
def test_an_outage_is_no_round_without_mixed_groups(tmp_path: Path, judged: int):
    """If a rollout was judged, the first groups are kept: a group of one judged is not mixed."""
    source = coins(1.0)

    def judge(scratch: Path) -> pd.DataFrame:
        rewards = source.judge(scratch)
        later = np.arange(len(rewards)) >= judged
        return rewards.assign(status=np.where(later, "unanswered", "scored"))

    bounded = resample_uniform_groups(prompts=6, prompts_per_batch=4, max_batches=3)
    pool = pd.DataFrame({"prompt_id": [f"p{each}" for each in range(100)]})
    down = source._replace(judge=judge)
    ends = pytest.raises(ServerError, match="no rollout was judged")
    with nullcontext() if judged else ends:
        drawn = draw_round(bounded, pool, {}, source=down, seed=0, scratch=tmp_path)
        assert (drawn.counts.batches, drawn.counts.kept) == (3, 6)


@pytest.mark.parametrize("others", ["unanswered", "failed"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_outage_within_a_draw_ends_it_and_fewer_judgments_are_warned_of(
    tmp_path: Path, share: float, others: str
):
    source = coins(1.0)
    batches = list[Path]()

    def judge(scratch: Path) -> pd.DataFrame:
        rewards = source.judge(scratch)
        batches.append(scratch)
        lost = np.arange(len(rewards)) < share * len(rewards) * (len(batches) > 1)
        status = np.where(lost, others, "scored")
        return rewards.assign(status=np.where(lost & (lost.cumsum() == 1), "unanswered", status))

    bounded = resample_uniform_groups(prompts=6, prompts_per_batch=4, max_batches=3)
    pool = pd.DataFrame({"prompt_id": [f"p{each}" for each in range(100)]})
    failing = source._replace(judge=judge)
    with (
        pytest.raises(ServerError, match="no rollout was judged") if share == 1.0 else nullcontext()
    ):
        drawn = draw_round(bounded, pool, {}, source=failing, seed=0, scratch=tmp_path)
        assert (drawn.unjudged or "").startswith("12 scored, ")
    assert len(batches) == 2


def test_a_round_has_mixed_groups_only_and_no_more_than_it_asks_for(resampled: DrawnRound):
    drawn, table = resampled, resampled.batch.table
    assert is_mixed(table).all()
    assert drawn.counts.kept == table["prompt_id"].nunique() == 4
    assert drawn.counts.sampled == 3 * drawn.counts.batches
    asked = CANDIDATES.set_index("prompt_id")["rollouts"]
    sizes = table.groupby("prompt_id").size()
    assert (sizes == asked.loc[sizes.index]).all()
    assert sorted(table["group"].unique()) == [0, 1, 2, 3]


def test_dropped_groups_are_paid_for(resampled: DrawnRound):
    assert resampled.batch.cost.sampled_steps > resampled.batch.table["steps"].sum()


def test_what_is_kept_is_what_was_sampled(resampled: DrawnRound):
    """The stored tensors are those of the kept rollouts: the policy gives them the same logp."""
    batch, policy = resampled.batch, policy_of()
    group = torch.tensor(batch.table["group"].to_numpy())
    trajectory, logp = policy.unpack(batch.tensors, group)
    assert policy.decode(trajectory) == batch.table["text"].tolist()
    torch.testing.assert_close(policy.log_prob(trajectory), logp, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "stop_at", [4, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 7))]
)
def test_an_interrupted_round_goes_on_to_the_same_bytes(
    tmp_path: Path, resampled: DrawnRound, stop_at: int
):
    write_round(tmp_path / "whole", resampled, has_selection=True)
    with pytest.raises(Interrupted):
        draw(tmp_path / "b", stop_at=stop_at)
    write_round(tmp_path / "resumed", draw(tmp_path / "b"), has_selection=True)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes(), path.name


def test_a_round_is_stored_with_its_counts_and_what_it_passed_over(
    tmp_path: Path, resampled: DrawnRound
):
    write_round(tmp_path, resampled, has_selection=True)
    assert read_passed(tmp_path) == resampled.passed
    pd.testing.assert_frame_equal(read_batch(tmp_path).table, resampled.batch.table)
    counts = read_json(tmp_path / "summary.json")["selection"]
    assert counts["sampled"] == counts["kept"] * counts["oversampling_factor"]


def test_without_a_selection_a_round_is_what_sampling_gives(tmp_path: Path):
    drawn = draw(tmp_path / "a", compose())
    plain = sample_rollouts(
        local_executor(policy_of()),
        CANDIDATES,
        rollouts_per_batch=4,
        seed=0,
        scratch=tmp_path / "b",
    )
    pd.testing.assert_frame_equal(drawn.batch.table, plain.table)
    assert drawn.batch.cost == plain.cost
    write_round(tmp_path / "round", drawn, has_selection=False)
    assert read_passed(tmp_path / "round") == []


@pytest.mark.parametrize("selection", [skip_uniform_prompts(prompts=5), visit_prompts(prompts=5)])
def test_a_number_of_prompts_is_sampled_in_one_batch(tmp_path: Path, selection: Selection):
    drawn = draw(tmp_path, selection)
    assert (drawn.counts.sampled, drawn.counts.kept, drawn.counts.batches) == (5, 5, 1)
    assert drawn.counts.oversampling_factor == 1.0


def test_reused_rollouts_are_the_profiles_first_ones_and_cost_nothing(tmp_path: Path):
    stored = write_profile(tmp_path / "profile")
    drawn = draw(
        tmp_path / "round", compose(reuse_profile_rollouts()), profile=tmp_path / "profile"
    )
    table = drawn.batch.table
    assert drawn.batch.cost == Cost()
    assert (drawn.counts.sampled, drawn.counts.reused) == (0, 12)
    for prompt, size in CANDIDATES.set_index("prompt_id")["rollouts"].items():
        first = stored.table[stored.table["prompt_id"] == prompt]["text"].tolist()[:size]
        assert table[table["prompt_id"] == prompt]["text"].tolist() == first
    policy = policy_of()
    trajectory, logp = policy.unpack(drawn.batch.tensors, torch.tensor(table["group"].to_numpy()))
    torch.testing.assert_close(policy.log_prob(trajectory), logp, atol=1e-5, rtol=0)


def test_a_group_is_no_larger_than_the_profiles(tmp_path: Path):
    write_profile(tmp_path / "profile", rollouts=2)
    drawn = draw(
        tmp_path / "round", compose(reuse_profile_rollouts()), profile=tmp_path / "profile"
    )
    assert (drawn.batch.table.groupby("prompt_id").size() == 2).all()


def test_uniform_groups_of_the_profile_are_dropped_for_free(tmp_path: Path):
    both = compose(RESAMPLE, reuse_profile_rollouts())
    write_profile(tmp_path / "profile")
    drawn = draw(tmp_path / "round", both, profile=tmp_path / "profile")
    assert is_mixed(drawn.batch.table).all()
    assert drawn.batch.cost == Cost()
    assert drawn.counts.oversampling_factor == 0.0


def test_a_prompt_that_the_profile_lacks_is_named(tmp_path: Path):
    stored = write_profile(tmp_path / "profile")
    without = stored.table[stored.table["prompt_id"] != "p3"]
    write_table(without, tmp_path / "profile" / "table.parquet", ROLLOUTS)
    with pytest.raises(ArtifactError, match="profile: has no rollouts of the prompt 'p3'"):
        draw(tmp_path / "round", compose(reuse_profile_rollouts()), profile=tmp_path / "profile")


def test_packed_rollouts_that_do_not_fit_are_refused(tmp_path: Path):
    stored, layout = write_profile(tmp_path), policy_of().layout
    group = torch.tensor(stored.table["group"].to_numpy())
    kept = torch.ones(len(group), dtype=torch.bool)
    assert select_packed(layout, stored.tensors, group, kept).keys() == stored.tensors.keys()
    short = {**stored.tensors, "tokens": stored.tensors["tokens"][:-1]}
    with pytest.raises(ArtifactError, match="tokens must have"):
        select_packed(layout, short, group, kept)
    with pytest.raises(ArtifactError, match="rollouts of 12 prompts"):
        select_packed(layout, stored.tensors, group[:-1], kept[:-1])
    with pytest.raises(ArtifactError, match="must hold"):
        select_packed(layout, {"tokens": stored.tensors["tokens"]}, group, kept)


def test_kept_rollouts_keep_their_experts():
    """What is repacked scores as it did: prompts, steps and the routing that is replayed."""
    policy = tiny_moe(routing="replay_sampled")
    prompts = CANDIDATES["prompt"][:4].tolist()
    sizes = [3, 2, 4, 2]
    trajectory, logp = policy.sample(prompts, group_sizes=sizes, generator=seeded())
    kept = torch.tensor([False] * 3 + [True] * 2 + [True, False] * 2 + [True] * 2)
    packed = select_packed(policy.layout, trajectory.pack(logp), trajectory.group, kept)
    again, stored_logp = policy.unpack(packed, trajectory.group[kept])
    steps = again.mask.shape[1]
    assert torch.equal(stored_logp, logp[kept][:, :steps])
    assert again.routing is not None
    with torch.no_grad():
        part = trajectory.select(kept.nonzero()[:, 0], steps)
        torch.testing.assert_close(policy.log_prob(again), policy.log_prob(part))
