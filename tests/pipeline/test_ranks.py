"""Two ranks train the same as one process, up to rounding."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from grpo.runtime.artifacts.files import read_json
from grpo.training.batches import assign_microbatches, pack_microbatches
from tests.pipeline.processes import start_function
from tests.pipeline.trained_in_ranks import ROUNDS, train_both

# Two ranks add up the same numbers in another order. In float32 a sum is off by about 1e-7 of its
# largest terms; AdamW divides a gradient by its own size, so that where terms cancel, three updates
# make at most some 1e-6 of that, relative to the weights. RMSNorm computes in float32 whatever the
# weights are: in float64 its rare other rounding is left.
# In bfloat16 gradients are rounded to eight bits, of one rank's microbatch or of what ranks add up.
RELATIVE = {torch.bfloat16: 2e-3, torch.float32: 5e-6, torch.float64: 1e-8}
METRICS = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-7}
RANKS = ("one", "two")
LONGEST_SECONDS = 120.0
COUNTS = ("update", "rollouts", "trained_rollouts", "trained_steps")


USUAL = ("grpo", "double", "few")
OTHERS = tuple(name for name in ROUNDS if name not in USUAL)
usual_rounds = pytest.mark.parametrize("left", [USUAL], indirect=True, ids=["usual"])


class Left(NamedTuple):
    """Where one rank has trained rounds, and two have, and one on what two left."""

    folder: Path
    names: tuple[str, ...]

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(
    scope="module",
    params=[USUAL, pytest.param(OTHERS, marks=pytest.mark.long)],
    ids=["usual", "others"],
)
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("ranks #1?%20")  # their files may lie anywhere
    process = start_function(train_both, folder, request.param)
    process.join(LONGEST_SECONDS)
    code = process.exitcode
    process.kill()
    assert code == 0
    return Left(folder, request.param)


def tensors(directory: Path) -> dict[str, Tensor]:
    """Returns everything that training changes: weights and moments."""
    files = sorted(directory.glob("*.safetensors"))
    return {f"{file.name}/{name}": each for file in files for name, each in load_file(file).items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the distance of two sets of tensors of the same names, relative to the second."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    return (apart / sum(float(each.double().square().sum()) for each in other.values())) ** 0.5


def metrics(directory: Path) -> list[dict[str, Any]]:
    return read_json(directory / "metrics.json")


def test_two_ranks_end_with_the_weights_and_moments_of_one_process(left: Left):
    for name in left.names:
        one, two = tensors(left / "one" / name), tensors(left / "two" / name)
        shapes = [{key: each.shape for key, each in found.items()} for found in (one, two)]
        assert shapes[0] == shapes[1], name
        assert difference(two, one) < RELATIVE[ROUNDS[name].weights], name


def test_two_ranks_see_the_losses_norms_and_counts_of_one_process(left: Left):
    for name in left.names:
        one, two = metrics(left / "one" / name), metrics(left / "two" / name)
        assert len(one) == ROUNDS[name].changes.get("updates_per_iteration", 3), name
        tolerance = METRICS[ROUNDS[name].weights]
        for alone, together in zip(one, two, strict=True):
            assert {key: alone[key] for key in COUNTS} == {key: together[key] for key in COUNTS}
            known = {key: value for key, value in alone.items() if value is not None}
            found = {key: value for key, value in together.items() if value is not None}
            assert found == pytest.approx(known, rel=tolerance, abs=tolerance), name
        alone, together = (read_json(left / each / name / "drift.json") for each in RANKS)
        assert together == pytest.approx(alone, abs=1e-6), name


@usual_rounds
def test_what_differs_is_rounding(left: Left):
    """The same round in float64: a hundredth of the difference."""
    apart = {
        name: difference(tensors(left / "two" / name), tensors(left / "one" / name))
        for name in ("grpo", "double")
    }
    assert 0 < apart["double"] < apart["grpo"] / 10


@usual_rounds
def test_a_rank_without_rollouts_takes_part(left: Left):
    """`few`: one rollout per update; and where there are more, their number is odd."""
    assert [each["trained_rollouts"] for each in metrics(left / "two" / "few")] == [1, 1, 1]
    assert [each["audit_cosine"] > 0 for each in metrics(left / "two" / "few")] == [True] * 3


def test_ranks_count_the_steps_of_all_and_the_flops_of_each(left: Left):
    """Microbatches of two ranks are cut otherwise, and padded otherwise: FLOPs differ by that."""
    for name in left.names:
        if name == "few":  # where most of what runs is run for nothing
            continue
        alone, together = (read_json(left / each / name / "cost.json") for each in RANKS)
        for one, two in zip(alone, together):
            assert two == {**one, "flops": two["flops"]}
            assert two["flops"] == pytest.approx(one["flops"], rel=0.1)


def test_each_rank_holds_its_share_of_weights_gradients_and_moments(left: Left):
    for name in left.names:
        (whole,) = held(left / "one" / name)
        first, second = held(left / "two" / name)
        for what, number in whole.items():
            assert first[what] + second[what] == number
            assert abs(first[what] - second[what]) < 0.1 * number


def held(directory: Path) -> list[dict[str, int]]:
    return [read_json(file) for file in sorted(directory.glob("held-*.json"))]


@usual_rounds
@pytest.mark.parametrize("ranks", RANKS)
def test_an_interrupted_round_resumes_to_the_same_bytes(left: Left, ranks: str):
    whole, resumed = left / ranks / "grpo", left / ranks / "resumed"
    for file in whole.glob("[!h]*"):
        assert file.read_bytes() == (resumed / file.name).read_bytes()


@usual_rounds
def test_one_process_goes_on_with_what_two_ranks_left(left: Left):
    found, expected = (tensors(left / "one" / f"after {each}") for each in ("two", "one"))
    assert difference(found, expected) < RELATIVE[torch.float32]


@given(
    widths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    ranks=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_microbatches_are_dealt_once_to_ranks_that_compute_equally_often(
    widths: list[int], budget: int, ranks: int
):
    given = torch.tensor(widths)
    dealt = assign_microbatches(given, budget, ranks)
    assert len(dealt) == ranks
    assert len({len(shares) for shares in dealt}) == 1
    counted = [share.rows for shares in dealt for share in shares if share.counts]
    assert sorted(torch.cat(counted).tolist()) == list(range(len(widths)))
    for rows in counted:
        assert len(rows) == 1 or len(rows) * int(given[rows].max()) <= budget
    if ranks == 1:  # as if there were no ranks
        packed = pack_microbatches(given, budget)
        assert [rows.tolist() for rows in counted] == [rows.tolist() for rows in packed]


@pytest.mark.parametrize(
    ("rollouts", "dealt"),
    [(17, [[9], [8]]), (16, [[8], [8]]), (33, [[9, 9], [9, 6]]), (1, [[1], [1]])],
)
def test_ranks_compute_about_equally_much_at_a_time(rollouts: int, dealt: list[list[int]]):
    """Rollouts of one width, room for 16: as evenly as can be, not 16 here and 1 there."""
    shares = assign_microbatches(torch.full((rollouts,), 4), 64, 2)
    assert [[len(share.rows) for share in own] for own in shares] == dealt
