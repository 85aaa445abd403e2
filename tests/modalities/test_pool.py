"""Environments in processes: failures stay in their slot, and no other slot notices."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from grpo.modalities.action_chunks.simulation.base import Ending, Moment
from grpo.modalities.action_chunks.simulation.pool import EnvironmentPool, Order
from tests.modalities.faulty import BROKEN_GOALS, BROKEN_OBSERVATIONS, BROKEN_PICTURES

FAULTY = "tests.modalities.faulty:Faulty"
ENDINGS = {
    "raises": Ending.FAILED,
    "dies": Ending.FAILED,
    "hangs": Ending.TIMED_OUT,
}


@pytest.fixture
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(FAULTY, processes=2, timeout_seconds=1.0) as opened:
        yield opened


def chunk(value: float) -> list[list[float]]:
    return [[value, 1.0], [value, 2.0]]


def test_a_slot_answers_what_its_actions_add_up_to(pool: EnvironmentPool):
    started = pool.play({0: "goes on | 0", 1: "solves | 2", 5: "solves | 1"})
    assert [each.executed for each in started.values()] == [0, 0, 0]
    moments = pool.play({0: chunk(1.0), 1: chunk(0.5), 5: chunk(0.25)})
    # Steps weigh 1 and 2: (1 + 1) + 2 (1 + 2) = 8.
    assert moments[0].observation.tolist() == [8.0]
    assert moments[0].ending is None
    assert moments[1][:3] == (np.array([6.5]), 2, Ending.SUCCESS)
    # What comes behind the goal is not carried out.
    assert moments[5][:3] == (np.array([1.25]), 1, Ending.SUCCESS)


@pytest.mark.parametrize("what", ENDINGS)
@pytest.mark.parametrize(
    "at", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 3))]
)
def test_a_broken_environment_is_an_ending_and_its_neighbors_go_on(
    pool: EnvironmentPool, what: str, at: int
):
    """Slots 0, 2 and 4 share a process with the broken one; 1 does not."""
    scenes: dict[int, Order] = dict.fromkeys((0, 1, 4), "goes on | 0")
    moments = pool.play({**scenes, 2: f"{what} | {at}"})
    broken = moments[2]
    seen = {slot: [] for slot in scenes}
    for value in (1.0, 2.0, 3.0):
        orders: dict[int, Order] = {slot: chunk(value + slot) for slot in scenes}
        if broken.ending is None:
            orders[2] = chunk(value)
        moments = pool.play(orders)
        broken = moments.get(2, broken)
        for slot in scenes:
            seen[slot].append(moments[slot])
    assert broken.ending == ENDINGS[what]
    for slot, each in seen.items():
        sums = np.cumsum([(3 + 4 * k) * (k + 1 + slot) + 5 + 6 * k for k in range(3)])
        assert [moment.observation.tolist() for moment in each] == [[total] for total in sums]
        assert [moment.ending for moment in each] == [None] * 3
    # A slot that was lost takes the next scene.
    assert pool.play({2: "goes on | 0"})[2].ending is None
    assert pool.play({2: chunk(1.0)})[2].observation.tolist() == [8.0]


@pytest.mark.long
def test_two_slots_of_a_process_may_break_in_one_exchange(pool: EnvironmentPool):
    pool.play({0: "hangs | 1", 2: "dies | 2", 4: "raises | 1", 6: "goes on | 0"})
    orders: dict[int, Order] = {slot: chunk(1.0) for slot in (0, 2, 4, 6)}
    moments = pool.play(orders)
    endings = [moments[slot].ending for slot in (0, 2, 4, 6)]
    assert endings == [Ending.TIMED_OUT, Ending.FAILED, Ending.FAILED, None]
    assert moments[6].observation.tolist() == [8.0]


EPISODE: list[Mapping[int, Order]] = [
    {0: "goes on | 0", 1: "solves | 5", 2: "goes on | 0", 4: "goes on | 0"},
    *({slot: chunk(value + slot) for slot in (0, 1, 2, 4)} for value in (1.0, 2.0)),
    {0: chunk(0.5), 1: chunk(3.0), 2: "goes on | 0", 4: chunk(0.25)},
]


def as_bytes(moments: Mapping[int, Moment]) -> list[tuple[bytes, int, Ending | None, bytes]]:
    return [
        (each.observation.tobytes(), each.executed, each.ending, each.picture.tobytes())
        for each in moments.values()
    ]


@pytest.mark.parametrize("what", ["dies once", "hangs once"])
@pytest.mark.parametrize(
    "at", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 4))]
)
def test_a_lost_scene_is_played_again_to_the_same_bytes(
    pool: EnvironmentPool, what: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process is killed, or stands still, in the middle of a chunk of slot 2."""
    monkeypatch.setenv("FAULTY_ONCE", str(tmp_path / "once"))
    undisturbed = [as_bytes(pool.play(orders)) for orders in EPISODE]
    disturbed = [{**EPISODE[0], 2: f"{what} | {at}"}, *EPISODE[1:]]
    assert [as_bytes(pool.play(orders)) for orders in disturbed] == undisturbed
    assert (tmp_path / "once").exists()


@pytest.mark.parametrize(
    "before",
    [1, *(pytest.param(each, marks=pytest.mark.long) for each in range(len(EPISODE)) if each != 1)],
)
def test_processes_that_are_killed_between_exchanges_change_nothing(
    pool: EnvironmentPool, before: int
):
    own = set(psutil.Process().children())
    undisturbed = [as_bytes(pool.play(orders)) for orders in EPISODE]
    workers = set(psutil.Process().children()) - own
    assert len(workers) == 2
    disturbed = []
    for number, orders in enumerate(EPISODE):
        if number == before:
            for worker in workers:
                worker.kill()
        disturbed.append(as_bytes(pool.play(orders)))
    assert disturbed == undisturbed


def test_a_simulator_that_does_not_repeat_itself_has_failed(pool: EnvironmentPool):
    """What was decided before the loss was decided on another state."""
    pool.play({0: "differs between processes | 9", 2: "dies | 2"})
    moments = pool.play({0: chunk(1.0), 2: chunk(1.0)})
    assert [each.ending for each in moments.values()] == [None, Ending.FAILED]
    assert pool.play({0: chunk(1.0)})[0].ending == Ending.FAILED
    assert pool.play({0: "goes on | 0"})[0].ending is None


BROKEN = [*BROKEN_OBSERVATIONS, *BROKEN_GOALS, *BROKEN_PICTURES]


@pytest.mark.parametrize("at", [1, 2])
def test_an_answer_that_cannot_be_stored_is_the_ending_of_its_own_scene(
    pool: EnvironmentPool, at: int
):
    scenes: dict[int, Order] = {slot: f"{what} | {at}" for slot, what in enumerate(BROKEN)}
    scenes[len(BROKEN)] = "goes on | 0"
    started = pool.play(scenes)
    assert {each.ending for each in started.values()} == {None}
    moments = pool.play({slot: chunk(1.0) for slot in scenes})
    assert [each.ending for each in moments.values()] == [Ending.FAILED] * len(BROKEN) + [None]
    # All is well in the next scene.
    assert pool.play({0: "goes on | 0"})[0].ending is None


def test_a_first_answer_that_cannot_be_stored_is_an_ending(pool: EnvironmentPool):
    shown = [*BROKEN_OBSERVATIONS, *BROKEN_PICTURES]
    moments = pool.play({slot: f"{what} | 0" for slot, what in enumerate(shown)})
    assert {each.ending for each in moments.values()} == {Ending.FAILED}


def test_workers_end_with_their_pool():
    before = set(psutil.Process().children())
    with EnvironmentPool(FAULTY, processes=1, timeout_seconds=1.0) as pool:
        pool.play({0: "goes on | 0"})
        (worker,) = set(psutil.Process().children()) - before
    assert not worker.is_running()
