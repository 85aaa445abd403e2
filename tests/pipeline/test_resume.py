"""A round of training, interrupted after any update, resumes to the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo.modalities.tokens.policy import TokenPolicy
from grpo.objective.advantage import center_by_moving_average
from grpo.objective.base import Objective, chain
from grpo.objective.trust import clip_surrogate
from grpo.objective.weight import average_over_steps, drop_uniform_groups
from grpo.params.parameters import Parameters, Training, read_params
from grpo.runtime.artifacts.files import Scratch
from grpo.training.schedule import LearningRate, schedule_learning_rate
from grpo.training.updates import Iteration, TrainedIteration, TrainingSettings, run_updates
from grpo.wiring.policies import make_optimizer
from stages.entry import scratch_of
from tests.modalities.tiny import rewarded, seeded, tiny_policy
from tests.pipeline.corruptions import set_param
from tests.pipeline.workspaces import write_two_arms

UPDATES = 4
SIZES = [4] * 8
Run = tuple[TokenPolicy, torch.optim.AdamW, TrainedIteration]


class Interrupted(Exception):
    """Simulates a kill within a process."""


def objective() -> Objective:
    """Returns a chain whose credit keeps a state, and whose loss clips."""
    return chain(
        center_by_moving_average(0.5),
        drop_uniform_groups(),
        average_over_steps(),
        clip_surrogate(0.2, 0.28),
    )


def train(
    scratch: Scratch,
    *,
    updates_per_checkpoint: int = 1,
    learning_rate: float = 0.01,
    schedule: LearningRate | None = None,
    stop_at: int | None = None,
    num_uniform: int = 0,
    passes: int = 1,
) -> Run:
    """Trains a fresh policy on fixed rollouts; `stop_at`: interrupted before that update."""

    def progress(done: int, total: int) -> None:
        if done == stop_at:
            raise Interrupted

    policy = tiny_policy()
    trajectory, logp = policy.sample(
        [f"{index}=" for index in range(len(SIZES))], group_sizes=SIZES, generator=seeded()
    )
    reward = (torch.arange(len(logp)) % 3 == 0).float()
    reward[trajectory.group < num_uniform] = 0.0
    training = Training(
        iterations_per_round=1,
        updates_per_iteration=UPDATES,
        staleness=0,
        stored_rollouts="all",
        learning_rate=learning_rate,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_grad_norm=1.0,
        tokens_per_microbatch=64,
        updates_per_checkpoint=updates_per_checkpoint,
        updates_per_audit=2,
        ranks=1,
    )
    optimizer = make_optimizer(policy.model, training)
    trained = run_updates(
        Iteration(
            policy=policy,
            trajectory=trajectory,
            rollouts=rewarded(trajectory, logp, reward),
            objective=objective(),
            objective_state=objective().init(),
            optimizer=optimizer,
            settings=TrainingSettings(
                updates_per_iteration=UPDATES,
                max_grad_norm=1.0,
                tokens_per_microbatch=64,
                updates_per_checkpoint=updates_per_checkpoint,
                updates_per_audit=2,
                passes_per_iteration=passes,
            ),
            first_update=5,
            generator=seeded(),
            learning_rate=schedule,
        ),
        scratch=scratch,
        progress=progress,
    )
    return policy, optimizer, trained


def assert_same(one: Run, other: Run) -> None:
    """Asserts that weights, moments, metrics, state and cost agree to the last bit."""
    for first, second in zip(one[0].model.parameters(), other[0].model.parameters(), strict=True):
        assert torch.equal(first, second)
    moments = [run[1].state_dict()["state"] for run in (one, other)]
    assert moments[0].keys() == moments[1].keys()
    for index, kept in moments[0].items():
        assert all(torch.equal(value, moments[1][index][key]) for key, value in kept.items())
    assert one[2].metrics == other[2].metrics
    assert one[2].objective_state == other[2].objective_state
    assert one[0].cost == other[0].cost


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        return train(Scratch("train@a-1", "a"))


@pytest.mark.parametrize(
    ("updates_per_checkpoint", "stop_at"), [*((1, each) for each in range(UPDATES)), (2, 1), (2, 3)]
)
def test_a_round_interrupted_before_any_update_resumes_to_the_same_bits(
    undisturbed: Run, updates_per_checkpoint: int, stop_at: int
):
    scratch = Scratch("disturbed", "a")
    with pytest.raises(Interrupted):
        train(scratch, updates_per_checkpoint=updates_per_checkpoint, stop_at=stop_at)
    kept = scratch.latest()
    whole = stop_at // updates_per_checkpoint * updates_per_checkpoint
    assert (kept[0] if kept else 0) == whole
    resumed = train(scratch, updates_per_checkpoint=updates_per_checkpoint)
    assert_same(resumed, undisturbed)


def test_a_round_interrupted_at_every_update_resumes_to_the_same_bits(undisturbed: Run):
    scratch = Scratch("disturbed", "a")
    for stop_at in range(UPDATES):
        with pytest.raises(Interrupted):
            train(scratch, stop_at=stop_at)
    assert_same(train(scratch), undisturbed)


@pytest.mark.parametrize("stop_at", [UPDATES - 1, UPDATES, 2 * UPDATES - 1])
def test_a_round_interrupted_in_any_pass_resumes_to_the_same_bits(stop_at: int):
    scratch = Scratch("disturbed", "a")
    with pytest.raises(Interrupted):
        train(scratch, passes=2, stop_at=stop_at)
    resumed = train(scratch, passes=2)
    assert_same(resumed, train(Scratch("whole", "a"), passes=2))
    assert len(resumed[2].metrics) == 2 * UPDATES


def test_a_round_resumes_from_before_its_first_step():
    """All groups uniform: the optimizer has no moments yet, and a checkpoint of it is whole."""
    scratch = Scratch("disturbed", "a")
    with pytest.raises(Interrupted):
        train(scratch, stop_at=3, num_uniform=len(SIZES))
    resumed = train(scratch, num_uniform=len(SIZES))
    assert_same(resumed, train(Scratch("undisturbed", "a"), num_uniform=len(SIZES)))
    assert all(each.trained_steps == 0 for each in resumed[2].metrics)


@pytest.mark.parametrize("stop_at", range(1, UPDATES))
def test_a_round_interrupted_within_a_schedule_resumes_to_the_same_bits(stop_at: int):
    """Updates 5 to 8: within the warm-up, at its end and in the decay."""
    schedule = schedule_learning_rate("cosine", 0.02, warmup_updates=7, total_updates=12)
    scratch = Scratch("disturbed", "a")
    with pytest.raises(Interrupted):
        train(scratch, schedule=schedule, stop_at=stop_at)
    resumed = train(scratch, schedule=schedule)
    assert_same(resumed, train(Scratch("whole", "a"), schedule=schedule))
    assert [each.learning_rate for each in resumed[2].metrics] == [*map(schedule, range(5, 9))]


def test_a_constant_schedule_without_warm_up_gives_the_bits_of_no_schedule(undisturbed: Run):
    schedule = schedule_learning_rate("constant", 0.01, warmup_updates=0, total_updates=0)
    constant = train(Scratch("constant", "a"), schedule=schedule)
    metrics = [replace(each, learning_rate=None) for each in constant[2].metrics]
    assert_same((*constant[:2], replace(constant[2], metrics=metrics)), undisturbed)


def test_a_half_written_checkpoint_is_none():
    def write_half(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise Interrupted

    scratch = Scratch("train@a-1", "a")
    scratch.save(1, lambda path: (path / "whole").touch())
    with pytest.raises(Interrupted):
        scratch.save(2, write_half)
    assert scratch.latest() == (1, scratch.directory / "checkpoint-00000001")


def parameters(*changes: tuple[str, object]) -> Parameters:
    """Returns the parameters of the two small arms with some of them changed."""
    write_two_arms(Path("params.yaml"))
    for path, value in changes:
        set_param(path, value)(Path())
    return read_params()


@pytest.mark.parametrize(
    "change",
    [
        ("seed", 1),
        ("reward.unfinished_penalty", 0.5),
        ("arms.uniform.training.learning_rate", 0.02),
        ("arms.uniform.training.updates_per_checkpoint", 2),
        ("rounds.uniform-1.phase", 2),
    ],
)
def test_a_changed_parameter_never_picks_up_an_old_checkpoint(change: tuple[str, object]):
    old = scratch_of("train@uniform-1", [], parameters())
    old.save(1, lambda path: (path / "whole").touch())
    assert scratch_of("train@uniform-1", [], parameters()).latest() is not None
    assert scratch_of("train@uniform-1", [], parameters(change)).latest() is None


def test_changed_code_or_input_never_picks_up_an_old_checkpoint():
    rewards, code = Path("rewards.parquet"), Path("grpo/training/updates.py")
    code.parent.mkdir(parents=True)
    for path in (rewards, code):
        path.write_text("old")
    old = scratch_of("train@uniform-1", [rewards], parameters())
    old.save(1, lambda path: (path / "whole").touch())
    assert scratch_of("train@uniform-1", [rewards], parameters()).latest() is not None
    for path in (rewards, code):
        path.write_text("new")
        assert scratch_of("train@uniform-1", [rewards], parameters()).latest() is None
        path.write_text("old")


def test_another_learning_rate_trains_from_the_start():
    with pytest.raises(Interrupted):
        train(scratch_of("train@uniform-1", [], parameters()), stop_at=3)
    path = "arms.uniform.training.learning_rate"
    changed = train(scratch_of("train@uniform-1", [], parameters((path, 0.02))), learning_rate=0.02)
    assert_same(changed, train(Scratch("undisturbed", "a"), learning_rate=0.02))
