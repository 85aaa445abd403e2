"""Laws of rounds with several iterations in the report: it is of all rollouts and all updates."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from finished_run import FLOPS, ReadWith, cost, write_later_iteration

from grpo.advice.prediction import count_round
from grpo.errors import ArtifactError
from grpo.modalities.shared.temperature import RisingTemperature
from grpo.params.parameters import Parameters
from grpo.report.learned import explain_missing_signal, find_empty_results
from grpo.report.numbers import (
    compute_numbers,
    cost_of,
    lengths_by_iteration,
    reward_spread,
    signal_by_step,
)
from grpo.report.page import PAGE, write_page
from grpo.report.reading import COST, read_rollouts, read_round_costs, read_run
from grpo.report.samples import read_samples
from grpo.report.signal_figures import draw_training
from grpo.runtime.artifacts.files import read_json, write_json
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.runtime.artifacts.tables import (
    CREDIT,
    PROFILE,
    REWARDS,
    ROLLOUTS,
    empty_table,
    is_judged,
    read_table,
    read_tables,
    write_table,
)

pytestmark = pytest.mark.usefixtures("figures_drawn_once")

ROUND = "sgpo-1"
SEVERAL = 3


@pytest.fixture
def trained(artifacts: Path) -> Path:
    """The artifacts of the run, in which one round has three iterations."""
    for index in range(1, SEVERAL):
        write_later_iteration(artifacts, ROUND, index)
    return artifacts


def with_training(params: Parameters, **changes: Any) -> Parameters:
    arm = params.arms["sgpo"]
    changed = arm.model_copy(update={"training": arm.training.model_copy(update=changes)})
    return params.model_copy(update={"arms": {**params.arms, "sgpo": changed}})


def files_of(artifacts: Path, pattern: str) -> list[Path]:
    """Returns a round's files of a kind, found without the code under test."""
    first, later = pattern.format(round=ROUND), Path(pattern).name
    if "rewards" in pattern:
        later = "rewards.parquet"
    if "rollouts" in pattern:
        later = f"rollouts/{later}"
    return [artifacts / first, *sorted(artifacts.glob(f"training/{ROUND}/iteration-*/{later}"))]


def test_counts_are_the_sums_over_the_files(trained: Path, params: Parameters) -> None:
    run = read_run(trained, params)
    tables = [
        read_table(each, ROLLOUTS) for each in files_of(trained, "rollouts/{round}/table.parquet")
    ]
    credit = [
        read_table(each, CREDIT) for each in files_of(trained, "training/{round}/credit.parquet")
    ]
    rewards = [read_table(each, REWARDS) for each in files_of(trained, "rewards/{round}.parquet")]
    assert len(tables) == len(credit) == len(rewards) == SEVERAL
    signal = compute_numbers(run).signal
    own = signal[signal["round"] == ROUND]
    assert own["rollouts"].sum() == len(run.rollouts[ROUND]) == sum(map(len, tables))
    assert own["groups"].sum() == sum(each["group"].nunique() for each in tables)
    trained_on = [(each["trained_steps"] > 0).sum() for each in credit]
    assert own["trained_rollouts"].sum() == sum(trained_on)
    mass = [(each["advantage"].abs() * each["weight"]).sum() for each in credit]
    assert own["advantage_mass"].sum() == pytest.approx(sum(mass))
    solved = sum(each["outcome"].sum() for each in rewards)
    assert run.rollouts[ROUND]["outcome"].sum() == solved
    updates = pd.read_csv(trained / f"training/{ROUND}/updates.csv")
    assert len(run.updates[ROUND]) == len(updates) == SEVERAL


def test_a_prompt_that_comes_again_is_another_group(trained: Path, params: Parameters) -> None:
    """`half` is sampled in every iteration: in two, three and two rollouts."""
    run = read_run(trained, params)
    rollouts = run.rollouts[ROUND]
    assert rollouts.duplicated("rollout_id").any()
    spreads = []
    for number, _ in enumerate(run.iterations[ROUND]):
        own = rollouts[rollouts["iteration"] == number]
        spreads += own.groupby("prompt_id")["reward"].std(ddof=0).tolist()
    assert reward_spread(rollouts) == pytest.approx(np.mean(spreads))
    half = compute_numbers(run).signal.set_index(["round", "bucket"]).loc[(ROUND, "(.25, .5]")]
    assert half["groups"] == SEVERAL
    assert half["uniform_groups"] == 0
    assert half["mean_group_size"] == pytest.approx((2 + 2 + 3) / 3)


def test_sampling_in_train_counts_as_sampling(trained: Path, params: Parameters) -> None:
    run = read_run(trained, params)
    sampling, update = FLOPS["sgpo"]
    own = run.costs[run.costs["round"] == ROUND].set_index(["stage", "kind"])["flops"]
    assert own.to_dict() == {
        (f"rollout@{ROUND}", "sampling"): sampling,
        (f"train@{ROUND}", "sampling"): 2 * 3,
        (f"train@{ROUND}", "update"): update,
        (f"evaluate@{ROUND}", "evaluation"): 7,
    }
    whole = read_json(trained / f"training/{ROUND}/summary.json")["cost"]
    first = read_json(trained / f"rollouts/{ROUND}/summary.json")["cost"]
    costs = read_round_costs(trained, ROUND)
    for each in COST:
        assert costs.sampling[each] + costs.update[each] == whole[each] + first[each]
        profile = cost(50)[each]
        assert cost_of(run, ROUND, "sgpo")[each] == whole[each] + first[each] + profile


def test_steps_are_weighted_by_their_rollouts(trained: Path, params: Parameters) -> None:
    run = read_run(trained, params)
    paths = files_of(trained, "training/{round}/steps.csv")
    rows = pd.concat([pd.read_csv(each) for each in paths])
    found = signal_by_step(run, "sgpo")
    for step, own in rows.groupby("step"):
        share = own["trained_rollouts"].sum() / len(run.rollouts[ROUND])
        assert found.loc[step, "trained_fraction"] == pytest.approx(share)
        known = own.dropna(subset="reward_std_within")
        if len(known):
            mean = np.average(known["reward_std_within"], weights=known["rollouts"])
            assert found.loc[step, "reward_std_within"] == pytest.approx(mean)


def test_a_selection_is_counted_over_all_iterations(trained: Path, params: Parameters) -> None:
    path = trained / f"rollouts/{ROUND}/summary.json"
    first = {"skipped": 2, "sampled": 5, "reused": 0, "kept": 2, "oversampling_factor": 2.5}
    write_json(path, {**read_json(path), "selection": first})
    arm = params.arms["sgpo"].model_copy(
        update={"selection": [{"resample_uniform_groups": {"prompts": 2, "prompts_per_batch": 2}}]}
    )
    changed = params.model_copy(update={"arms": {**params.arms, "sgpo": arm}})
    counts = read_run(trained, changed).selections[ROUND]
    expected = {"skipped": 4, "sampled": 11, "reused": 0, "kept": 6, "oversampling_factor": 11 / 6}
    assert counts == pytest.approx(expected)


@pytest.mark.parametrize(
    ("last", "said"), [(1.3, "temperature 1.2 to 1.3"), (1.2, "temperature 1.2")]
)
def test_a_temperature_that_may_rise_is_shown(
    trained: Path, params: Parameters, last: float, said: str
) -> None:
    rising = RisingTemperature(
        first=1.2, last=1.6, step=0.05, iterations=1, tolerance=0, cooldown=0, scored_at=None
    )
    arm = params.arms["sgpo"]
    sampling = arm.sampling.model_copy(update={"temperature": rising})
    arms = {**params.arms, "sgpo": arm.model_copy(update={"sampling": sampling})}
    records = [each.record for each in iterations_of(trained, ROUND)]
    for each, temperature in zip(records, (1.2, 1.25, last), strict=True):
        write_json(each / "sampling.json", {"temperature": temperature, "scored_at": temperature})
    write_page(trained, params.model_copy(update={"arms": arms}), trained / "report")
    assert f"<small>{said}</small>" in (trained / "report" / PAGE).read_text()
    (records[1] / "sampling.json").unlink()
    with pytest.raises(ArtifactError, match=r"iteration-0001/sampling.json"):
        read_run(trained, params.model_copy(update={"arms": arms}))


def test_a_round_that_stopped_on_a_plateau_says_after_how_many_iterations(
    trained: Path, params: Parameters
) -> None:
    path = trained / "training" / ROUND / "summary.json"
    plateau = {"before": 0.5, "after": 0.5, "planned_iterations": 8}
    write_json(path, {**read_json(path), "plateau": plateau})
    write_page(trained, params, trained / "report")
    page = (trained / "report" / PAGE).read_text()
    assert page.count(f"stopped on a plateau after {SEVERAL} of 8 iterations") == 1


@pytest.mark.parametrize("stored", ["all", "without_media", "tables"])
def test_samples_are_of_the_first_and_the_last_iteration(
    trained: Path, params: Parameters, stored: str, tmp_path: Path
) -> None:
    changed = with_training(params, stored_rollouts=stored)
    samples = read_samples(trained, read_run(trained, changed))
    assert {each.iteration for each in samples["uniform-1"]} == {""}
    labels = [each.iteration for each in samples[ROUND]]
    assert labels == ["iteration 1 of 3"] * 3 + ["iteration 3 of 3"] * 2
    assert {each.text for each in samples[ROUND][3:]} == {"drawn 2"}
    write_page(trained, changed, tmp_path / "report")
    page = (tmp_path / "report" / PAGE).read_text()
    assert page.count("always/0, iteration 3 of 3") == 1
    assert page.count("of the first and of the last iteration") == 1
    row = re.search(rf"train@{ROUND}<small>([^<]+)</small>", page)
    assert row is not None
    assert " ".join(row[1].split()) == "sampling 6 FLOP, update 20 FLOP"


def test_a_page_of_rounds_of_one_iteration_has_no_word_of_it(
    artifacts: Path, params: Parameters
) -> None:
    write_page(artifacts, params, artifacts / "report")
    page = (artifacts / "report" / PAGE).read_text()
    assert "of the first and of the last iteration" not in page
    assert not re.search(r"iteration \d of", page)


def test_a_round_that_learned_in_a_later_iteration_learned(
    trained: Path, params: Parameters
) -> None:
    """Its first iteration, which is all that the summary of one iteration shows, taught nothing."""
    path = trained / f"training/{ROUND}/credit.parquet"
    write_table(read_table(path, CREDIT).assign(weight=0.0), path, CREDIT)
    assert explain_missing_signal(trained, params)[ROUND] is None
    for index in range(1, SEVERAL):
        own = trained / f"training/{ROUND}/iteration-{index:04d}/credit.parquet"
        write_table(read_table(own, CREDIT).assign(weight=0.0), own, CREDIT)
    titles = [each.title for each in find_empty_results(trained, params)]
    assert f"train@{ROUND} learned nothing" in titles


@pytest.mark.parametrize(
    "name", ["rollouts/table.parquet", "rewards.parquet", "credit.parquet", "steps.csv"]
)
def test_a_missing_file_of_an_iteration_is_named_in_one_line(
    trained: Path, params: Parameters, name: str
) -> None:
    (trained / f"training/{ROUND}/iteration-0002" / name).unlink()
    with pytest.raises(ArtifactError, match=f"iteration-0002/{name}: no such file") as caught:
        read_run(trained, params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({"iterations": 0}, "iterations must be a whole number >= 1, got 0"),
        ({"iterations": "3"}, "iterations must be a whole number >= 1, got '3'"),
        ({"iterations": 4}, "iteration-0003.*no such file"),
        ({"sampling_cost": cost(1000)}, "sampling_cost.flops must be at most cost.flops"),
        ({"sampling_cost": None}, "'flops' is missing"),
    ],
)
def test_a_wrong_summary_is_named_in_one_line(
    trained: Path, params: Parameters, summary: dict[str, Any], message: str
) -> None:
    path = trained / f"training/{ROUND}/summary.json"
    write_json(path, {**read_json(path), **summary})
    with pytest.raises(ArtifactError, match=message):
        read_run(trained, params)


def test_rewards_of_other_rollouts_are_refused(trained: Path, params: Parameters) -> None:
    path = trained / f"training/{ROUND}/iteration-0001/rewards.parquet"
    write_table(read_table(path, REWARDS).iloc[1:], path, REWARDS)
    with pytest.raises(ArtifactError, match=rf"iteration-0001/rewards.parquet.*train@{ROUND}"):
        read_run(trained, params)


WRONG: dict[str, tuple[str, Callable[[pd.DataFrame], pd.DataFrame]]] = {
    "twice": ("must be unique", lambda table: pd.concat([table, table.iloc[:1]])),
    "empty id": ("'prompt_id' must not be empty", lambda table: table.assign(prompt_id="")),
    "negative": ("'group' must be >= 0", lambda table: table.assign(group=-1)),
    "other type": (
        "'steps' must be",
        lambda table: table.assign(steps=table["steps"].astype(float)),
    ),
    "other order": ("columns must be", lambda table: table[table.columns[::-1]]),
    "one group": ("'group' must be of one prompt", lambda table: table.assign(group=0)),
    "no row": ("at least one row", lambda table: table.iloc[:0]),
    "no column": ("'text' is missing", lambda table: table.drop(columns="text")),
    "member": ("'rollout_id' must be its prompt_id", lambda table: table.iloc[::-1]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_tables_that_are_checked_together_are_refused_as_alone(trained: Path, kind: str) -> None:
    paths = files_of(trained, "rollouts/{round}/table.parquet")
    for together, alone in zip(read_tables(paths, ROLLOUTS), paths, strict=True):
        pd.testing.assert_frame_equal(together, read_table(alone, ROLLOUTS))
    message, change = WRONG[kind]
    changed = change(pd.read_parquet(paths[1]))
    changed.to_parquet(paths[1], index=False)
    with pytest.raises(ArtifactError, match=message) as alone_refused:
        read_table(paths[1], ROLLOUTS)
    with pytest.raises(ArtifactError) as together_refused:
        read_tables(paths, ROLLOUTS)
    assert str(together_refused.value) == str(alone_refused.value)


@pytest.mark.long
def test_many_iterations_are_read_in_less_than_a_second(artifacts: Path) -> None:
    for index in range(1, 32):
        write_later_iteration(artifacts, ROUND, index)
    files = iterations_of(artifacts, ROUND)
    assert len(files) == 32
    seconds = []
    for _ in range(3):
        start = time.process_time()
        rollouts = read_rollouts(files, empty_table(PROFILE))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0
    assert is_judged(rollouts).all()
    assert rollouts["iteration"].nunique() == 32


def test_advice_counts_what_all_iterations_did(trained: Path) -> None:
    facts = SimpleNamespace(profile=read_table(trained / "profile/prompts.parquet", PROFILE))
    counted = count_round(trained, ROUND, facts, rollouts_per_batch=1000)
    files = iterations_of(trained, ROUND)
    whole = read_json(trained / f"training/{ROUND}/summary.json")["cost"]
    first = read_json(trained / f"rollouts/{ROUND}/summary.json")["cost"]
    tables = [read_table(each.table, ROLLOUTS) for each in files]
    assert counted.prompts == {name for each in tables for name in each["prompt_id"]}
    amounts = counted.amounts
    assert amounts.groups == sum(each["group"].nunique() for each in tables)
    assert amounts.rollouts == sum(map(len, tables))
    assert amounts.uniform_groups == 1  # `never`, in the first iteration
    assert amounts.flops == whole["flops"] + first["flops"]
    assert amounts.sampling_flops == first["flops"] + 2 * 3
    assert amounts.decode_steps == sum(each["steps"].max() for each in tables)
    assert amounts.sampled_steps == first["sampled_steps"] + 2 * cost(3)["sampled_steps"]


def test_a_round_of_one_iteration_is_read_as_it_was(read_with: ReadWith, artifacts: Path) -> None:
    """One join on rollout_id."""
    parts = [
        read_table(artifacts / path, schema)
        for path, schema in (
            (f"rollouts/{ROUND}/table.parquet", ROLLOUTS),
            (f"rewards/{ROUND}.parquet", REWARDS),
            (f"training/{ROUND}/credit.parquet", CREDIT),
        )
    ]
    joined = parts[0]
    for other in parts[1:]:
        indexed = other.set_index("rollout_id").drop(columns="prompt_id")
        joined = joined.join(indexed, on="rollout_id")
    found = read_with().rollouts[ROUND]
    assert (found["iteration"] == 0).all()
    pd.testing.assert_frame_equal(found[joined.columns], joined)


def test_lengths_are_means_of_the_rollouts_of_an_iteration(
    trained: Path, params: Parameters
) -> None:
    lengths = lengths_by_iteration(read_run(trained, params), "sgpo")
    assert lengths.index.tolist() == [1, 2, 3]
    # Four rollouts of 3 steps, one of them cut; then rollouts of 2 steps that end.
    assert lengths["mean_steps"].tolist() == [3.0, 2.0, 2.0]
    assert lengths["cut_fraction"].tolist() == [0.25, 0.0, 0.0]


def test_a_metric_is_drawn_where_it_is_recorded(trained: Path, params: Parameters) -> None:
    assert "gradient norm" not in draw_training(read_run(trained, params)).svg
    path = trained / "training" / ROUND / "updates.csv"
    table = pd.read_csv(path)
    norms = np.arange(1.0, len(table) + 1)
    table.assign(grad_norm=norms).to_csv(path, index=False)
    svg = draw_training(read_run(trained, params)).svg
    assert "gradient norm before clipping" in svg
    assert f"sgpo: {len(norms)} values from 1 to {norms[-1]:g}, the last is {norms[-1]:g}" in svg
    assert "uniform: no values" in svg
