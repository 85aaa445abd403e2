"""A round that stops on a plateau is the beginning of the round that does not."""

from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.modalities.shared.directories import read_state
from grpo.report.reading import read_round_costs
from grpo.runtime.artifacts.files import read_json, remove
from grpo.runtime.artifacts.stored_iterations import iterations_of
from grpo.types import Cost
from grpo.wiring import rounds
from tests.files import contents
from tests.pipeline.chains import (
    draw_round,
    outputs_of,
    prepare_chain,
    train_round,
    write_chain,
)

ITERATIONS = 8
N = 2
OBJECTIVE = [{"grpo": {"low": 0.2, "high": 0.28, "beta": 0.0}}]
STALE = [{"truncate_mismatch": {"weight_max": 2.0}}, *OBJECTIVE]
TRAINING = {
    "iterations_per_round": ITERATIONS,
    "updates_per_iteration": 2,
    "updates_per_checkpoint": 1,
    "learning_rate": 0.02,
}
NAME = "uniform-1"
POLICY, RECORD = outputs_of(NAME)


class Interrupted(Exception):
    """Simulates a kill within a process."""


def write(staleness: int, tolerance: float | None) -> None:
    """Writes the parameters; with a tolerance, the round stops on a plateau."""
    stop = {} if tolerance is None else {"iterations": N, "tolerance": tolerance}
    more = {"stop_on_plateau": stop} if stop else {}
    write_chain(1, STALE if staleness else OBJECTIVE, **TRAINING, staleness=staleness, **more)


def train(staleness: int, tolerance: float | None) -> None:
    """Trains the round anew."""
    for path in (POLICY, RECORD):
        remove(path)
    write(staleness, tolerance)
    train_round(NAME, "base")


def mean_rewards() -> list[float]:
    """Returns the mean reward of each iteration, from the stored rewards and rollouts."""
    means = []
    for each in iterations_of(Path("artifacts"), NAME):
        rewards = pd.read_parquet(each.rewards)
        means.append(float(rewards.loc[rewards["status"] == "scored", "reward"].mean()))
    return means


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.long), 1])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, dict[str, bytes], list[float]]]:
    """Yields staleness, files of training and mean rewards of a round that does not stop."""
    with chdir(tmp_path_factory.mktemp("plateau")):
        write(request.param, None)
        prepare_chain()
        draw_round(NAME, "base")
        train(request.param, None)
        yield request.param, contents(RECORD), mean_rewards()


@pytest.fixture(scope="module")
def stopped(
    whole: tuple[int, dict[str, bytes], list[float]],
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Returns the files of a round that stops at once, uninterrupted; it is left in its place."""
    train(whole[0], 9.0)
    return contents(RECORD), contents(POLICY)


def end_of(rewards: list[float], tolerance: float) -> int:
    """Returns the number of iterations after which the round ends."""
    for done in range(2 * N, ITERATIONS):
        last = np.array(rewards[done - 2 * N : done]).reshape(2, N).mean(axis=1)
        if last[1] - last[0] <= tolerance:
            return done
    return ITERATIONS


@pytest.mark.parametrize("tolerance", [9.0, 0.0, pytest.param(0.05, marks=pytest.mark.long)])
def test_it_has_the_files_of_the_iterations_before_its_end_and_no_others(
    whole: tuple[int, dict[str, bytes], list[float]], tolerance: float
):
    staleness, files, rewards = whole
    train(staleness, tolerance)
    end = end_of(rewards, tolerance)
    assert end == 2 * N or tolerance < 9
    later = [f"iteration-{index:04d}" for index in range(1, ITERATIONS)]
    assert sorted(each.name for each in RECORD.glob("iteration-*")) == later[: end - 1]
    assert mean_rewards() == rewards[:end]
    kept = contents(RECORD)
    for name in kept.keys() - {"updates.csv", "summary.json"}:
        assert kept[name] == files[name], name
    updates = kept["updates.csv"].decode().splitlines()
    assert updates == files["updates.csv"].decode().splitlines()[: len(updates)]
    summary = read_json(RECORD / "summary.json")
    assert summary["iterations"] == end
    assert read_state(POLICY, NAME).updates == summary["updates"] == len(updates) - 1
    if end == ITERATIONS:
        assert "plateau" not in summary
    else:
        before, after = np.array(rewards[end - 2 * N : end]).reshape(2, N).mean(axis=1)
        assert summary["plateau"] == pytest.approx(
            {"before": before, "after": after, "planned_iterations": ITERATIONS}
        )


@pytest.mark.usefixtures("stopped")
def test_iterations_that_did_not_run_cost_nothing():
    later = [
        Cost(**read_json(each.rollouts / "cost.json"))
        for each in iterations_of(Path("artifacts"), NAME)[1:]
    ]
    assert len(later) == 2 * N - 1
    spent = read_round_costs(Path("artifacts"), NAME)
    assert spent.later_sampling == vars(sum(later, Cost()))


@pytest.mark.parametrize(
    "stop_at", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 4)), 7]
)
def test_an_interrupted_round_stops_on_the_same_plateau_with_the_same_bytes(
    whole: tuple[int, dict[str, bytes], list[float]],
    stopped: tuple[dict[str, bytes], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    stop_at: int,
):
    """Within its first, third and last iteration."""
    staleness, *_ = whole
    original = rounds._advance_bar

    def interrupt(progress: object, earlier: int, planned: int, done: int, total: int) -> None:
        if earlier + done == stop_at:
            raise Interrupted

    monkeypatch.setattr(rounds, "_advance_bar", interrupt)
    with pytest.raises(Interrupted):
        train(staleness, 9.0)
    monkeypatch.setattr(rounds, "_advance_bar", original)
    train_round(NAME, "base")
    assert (contents(RECORD), contents(POLICY)) == stopped
