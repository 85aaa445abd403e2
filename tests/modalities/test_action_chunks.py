"""Chunked policies: what was sampled is what is scored, and only what is needed is forwarded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo.errors import ArtifactError
from grpo.modalities.action_chunks.modality import ChunkDecoding
from grpo.modalities.action_chunks.model import load_action_model, save_action_model
from grpo.modalities.action_chunks.policy import ActionChunkPolicy
from grpo.modalities.action_chunks.simulation.base import Ending
from grpo.modalities.action_chunks.trajectories import ChunkTrajectory, to_values
from grpo.modalities.policy import Policy, Trajectory
from grpo.modalities.shared.flops import missing_flop_formulas
from grpo.modalities.shared.packed import select_packed
from grpo.modalities.shared.recomputation import saved_bytes
from grpo.modalities.shared.tokenizers import make_word_tokenizer
from grpo.runtime.artifacts.tensors import write_tensors
from tests.modalities.tiny_actor import SCENES, SHAPE, tiny_actor, tiny_model


@pytest.fixture(scope="module")
def actor() -> Iterator[ActionChunkPolicy]:
    with tiny_actor() as opened:
        yield opened


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(actor: ActionChunkPolicy, seed: int = 0) -> tuple[ChunkTrajectory, Tensor]:
    return actor.sample(SCENES, group_sizes=[2, 3, 2], generator=seeded(seed))


def test_it_is_a_policy_whose_rollouts_end_as_their_scenes_do(actor: ActionChunkPolicy):
    trajectory, logp = drawn(actor)
    assert isinstance(actor, Policy)
    assert isinstance(trajectory, Trajectory)
    limit, success = int(Ending.STEP_LIMIT), int(Ending.SUCCESS)
    assert trajectory.ending.tolist() == [limit] * 2 + [success] * 3 + [limit] * 2
    # The goal is at the third step: the second chunk ends at its first action.
    assert trajectory.mask.sum(dim=1).tolist() == [4, 4, 2, 2, 2, 4, 4]
    assert trajectory.executed.tolist() == [2] * 8 + [2, 1] * 3 + [2] * 8
    assert actor.decode(trajectory)[1:3] == ["no success in 8 steps", "success after 3 steps"]
    assert actor.is_finished(trajectory).tolist() == [False] * 2 + [True] * 3 + [False] * 2
    assert (logp[trajectory.mask] < 0).all()
    assert (logp[~trajectory.mask] == 0).all()


def test_log_probs_are_those_of_the_actions_that_were_carried_out(actor: ActionChunkPolicy):
    trajectory, logp = drawn(actor)
    with torch.no_grad():
        scored = actor.log_prob(trajectory)
        prompt = trajectory.group[trajectory.mask.nonzero()[:, 0]]
        logits = actor.model(
            trajectory.instruction[prompt],
            trajectory.instruction_mask[prompt],
            trajectory.observation,
        )
    torch.testing.assert_close(scored, logp, atol=1e-5, rtol=1e-5)
    by_token = torch.distributions.Categorical(logits=logits).log_prob(trajectory.action)
    for row, executed in enumerate(trajectory.executed.tolist()):
        by_token[row, executed * SHAPE.actions :] = 0
    torch.testing.assert_close(scored[trajectory.mask], by_token.sum(dim=1))


def test_environments_see_the_middles_of_the_bins(actor: ActionChunkPolicy):
    assert to_values(torch.arange(5)[None].repeat(1, 1), SHAPE).tolist() == [[-1, -0.5, 0, 0.5, 1]]
    trajectory, _ = drawn(actor)
    # The environment adds up actions times the number of the step.
    first = to_values(trajectory.action[:1], SHAPE)[0]
    expected = first[:2].sum() + 2 * first[2:].sum()
    assert float(trajectory.observation[1]) == pytest.approx(float(expected), abs=1e-6)
    torch.testing.assert_close(trajectory.chunks.action[0, 0], first)
    # What came behind the goal was not done.
    assert (trajectory.chunks.action[2, 1, SHAPE.actions :] == 0).all()


def test_rollouts_are_the_same_for_any_number_of_processes(actor: ActionChunkPolicy):
    trajectory, logp = drawn(actor)
    with tiny_actor(processes=3) as other:
        again, again_logp = drawn(other)
    packed, other_packed = trajectory.pack(logp), again.pack(again_logp)
    assert all(torch.equal(packed[name], other_packed[name]) for name in packed)
    different, _ = drawn(actor, seed=1)
    assert not torch.equal(different.action, trajectory.action)


def test_padding_of_instructions_changes_no_log_prob(actor: ActionChunkPolicy):
    """A batch with longer instructions pads shorter ones: their positions must not move."""
    alone, logp = actor.sample(SCENES[1:2], group_sizes=[3], generator=seeded())
    assert alone.instruction.shape[1] == 1
    padded = ChunkTrajectory(
        **{
            **vars(alone),
            "instruction": torch.cat([alone.instruction, alone.instruction * 0], dim=1),
            "instruction_mask": torch.tensor([[True, False]]),
        }
    )
    with torch.no_grad():
        torch.testing.assert_close(actor.log_prob(padded), logp, atol=1e-5, rtol=1e-5)


def test_every_position_sees_every_other(actor: ActionChunkPolicy):
    """The first decoding position must look at what stands behind it."""
    model = tiny_model()
    words, mask = torch.tensor([[2, 3]]), torch.ones(1, 2, dtype=torch.bool)
    state = torch.ones(1, 1)
    with torch.no_grad():
        before = model(words, mask, state)[0, 0]
        model.queries[-1] += 1.0
        assert not torch.equal(model(words, mask, state)[0, 0], before)


def test_an_environment_that_fails_leaves_no_steps_and_no_trace_in_the_others(
    actor: ActionChunkPolicy,
):
    scenes = ["raises | 3", "goes on | 0", "nan | 1", "dies | 2", "hangs | 4", "solves | 2"]
    trajectory, logp = actor.sample(scenes, group_sizes=[1] * 6, generator=seeded())
    endings = [Ending(each) for each in trajectory.ending.tolist()]
    failed, late = Ending.FAILED, Ending.TIMED_OUT
    assert endings == [failed, Ending.STEP_LIMIT, failed, failed, late, Ending.SUCCESS]
    assert trajectory.mask.sum(dim=1).tolist() == [0, 4, 0, 0, 0, 1]
    texts = actor.decode(trajectory)
    assert texts[0] == "the environment failed"
    assert texts[4] == "the environment timed out"
    assert torch.isfinite(logp).all()
    assert len(trajectory.pack(logp)["executed"]) == 5


def test_a_killed_simulator_leaves_the_stored_bytes_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAULTY_ONCE", str(tmp_path / "once"))
    files = []
    for name in ("undisturbed", "killed"):
        with tiny_actor(processes=2) as other:
            if name == "undisturbed":
                (tmp_path / "once").touch()
            scenes = ["solves | 3", "dies once | 4", "goes on | 0"]
            trajectory, logp = other.sample(scenes, group_sizes=[2, 3, 2], generator=seeded())
            write_tensors(tmp_path / name, trajectory.pack(logp))
            files.append((tmp_path / name).read_bytes())
            (tmp_path / "once").unlink()
    assert files[0] == files[1]


def test_greedy_draws_are_the_likeliest_and_need_no_luck(actor: ActionChunkPolicy):
    before = actor.decoding
    actor.decoding = ChunkDecoding(temperature=0.0, max_steps=4)
    first, second = (drawn(actor, seed)[0] for seed in (0, 1))
    actor.decoding = before
    assert torch.equal(first.action, second.action)


def test_what_was_packed_comes_back_and_can_be_cut(actor: ActionChunkPolicy):
    trajectory, logp = drawn(actor)
    group = trajectory.group * 3 + 1
    packed = trajectory.pack(logp)
    back, behavior = actor.unpack(packed, group)
    assert torch.equal(behavior, logp)
    assert torch.equal(back.chunks.phase, trajectory.chunks.phase)
    assert torch.equal(back.chunks.action, trajectory.chunks.action)
    kept = torch.tensor([False, True, False, True, True, False, False])
    part = select_packed(actor.layout, packed, group, kept)
    again, behavior = actor.unpack(part, group[kept])
    assert torch.equal(behavior[:, :4], logp[kept])
    with torch.no_grad():
        torch.testing.assert_close(actor.log_prob(again), logp[kept], atol=1e-5, rtol=1e-5)
    rows = torch.tensor([4, 0])
    cut = trajectory.select(rows, 2)
    with torch.no_grad():
        torch.testing.assert_close(actor.log_prob(cut), logp[rows, :2], atol=1e-5, rtol=1e-5)


def test_only_needed_chunks_are_forwarded_and_pay(actor: ActionChunkPolicy):
    """METHODS' test 6: rows in the forward pass, activation bytes and FLOPs follow what is kept."""
    trajectory, _ = drawn(actor)
    rows: list[int] = []
    hook = actor.model.register_forward_hook(lambda module, given, out: rows.append(len(out)))
    spent, saved = [], []
    for keeps in (1, 2, 4):
        needed = trajectory.mask & (torch.arange(4) < keeps)
        start = actor.cost.flops
        with saved_bytes(actor.model) as activations:
            scores = actor.step_log_probs(trajectory, needed)
        assert scores.logp.requires_grad
        saved.append(activations.total)
        spent.append(actor.cost.flops - start)
        widths = actor.widths(trajectory, torch.arange(7), needed)
        assert torch.equal(widths, needed.sum(dim=1) * (3 + 1 + SHAPE.positions))
    hook.remove()
    # One row more where the FLOPs of a row were measured.
    assert [each for each in rows if each > 1] == [7, 14, 22]
    assert [each / spent[0] for each in spent] == pytest.approx([1, 2, 22 / 7])
    assert [each / saved[0] for each in saved] == pytest.approx([1, 2, 22 / 7], rel=0.05)


def test_flops_are_those_that_torch_counts(actor: ActionChunkPolicy):
    trajectory, _ = drawn(actor)
    start = actor.cost.flops
    with torch.no_grad():
        actor.log_prob(trajectory)
    counter: Any = FlopCounterMode(display=False, custom_mapping=missing_flop_formulas())
    with counter, torch.no_grad():
        prompt = trajectory.group[trajectory.mask.nonzero()[:, 0]]
        actor.model(
            trajectory.instruction[prompt],
            trajectory.instruction_mask[prompt],
            trajectory.observation,
        )
    assert actor.cost.flops - start == counter.get_total_flops()


def test_a_saved_model_is_the_same_model(tmp_path: Path):
    model, tokenizer = tiny_model(), make_word_tokenizer(["goes on"])
    save_action_model(tmp_path, model, tokenizer)
    again = load_action_model(tmp_path, torch.float32)
    assert again.shape == SHAPE
    for name, each in model.state_dict().items():
        assert torch.equal(each, again.state_dict()[name]), name
    (tmp_path / "actions.json").write_text('{"length": 2}')
    with pytest.raises(
        ArtifactError, match=r"actions.json: must hold the fields of a chunk's shape"
    ):
        load_action_model(tmp_path, torch.float32)


WRONG = {
    "observation must be finite": ("observation", lambda each: each * torch.nan),
    r"action must be in \[0, 5\)": ("action", lambda each: each + 5),
    r"executed must be in \[1, 2\]": ("executed", lambda each: each * 0),
    "executed must have 22 entries, got 21": ("executed", lambda each: each[1:]),
    "ending must be an Ending": ("ending", lambda each: each + 9),
}


@pytest.mark.parametrize("message", WRONG)
def test_broken_tensors_are_refused_in_a_sentence(actor: ActionChunkPolicy, message: str):
    trajectory, logp = drawn(actor)
    name, change = WRONG[message]
    packed = trajectory.pack(logp)
    packed[name] = change(packed[name])
    with pytest.raises(ArtifactError, match=message):
        actor.unpack(packed, trajectory.group)
