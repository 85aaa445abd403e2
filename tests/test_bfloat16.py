"""The record of drift of benchmarks.bfloat16: what the link writes, and statistics by update."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.bfloat16 import drift_by_update
from benchmarks.record_drift import FOLDER, record_drift
from grpo.objective.algorithms import grpo
from grpo.objective.base import chain, loss
from grpo.types import Credit

BEHAVIOR = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
PROXIMAL = torch.tensor([[-1.5, -2.0], [-3.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def loss_of(logp: Tensor, *, records: bool) -> Tensor:
    objective = grpo(beta=0.0)
    return loss(
        chain(record_drift(), objective) if records else objective,
        logp=logp,
        proximal_logp=PROXIMAL,
        behavior_logp=BEHAVIOR,
        credit=Credit(advantage=MASK, weight=MASK),
    )


def test_each_update_has_the_statistics_of_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps of the first update: 0.5, 0 and 0; of the second, with logp 1 nat higher, the same."""
    monkeypatch.chdir(tmp_path)
    for moved in (0.0, 1.0):
        logp = (PROXIMAL + moved).requires_grad_()
        assert torch.equal(loss_of(logp, records=True), loss_of(logp, records=False))
        loss_of(logp.detach(), records=True)  # has no gradient, as what measures rule U27
    found = drift_by_update(FOLDER, [2, 0, 2], dimensions=2)
    # |differences| are halved: they are per dimension.
    assert found["behavior and proximal, mean"] == pytest.approx([0.25 / 3, None, 0.25 / 3])
    assert found["proximal and trainer, mean"] == pytest.approx([0.0, None, 0.5])
    assert found["behavior and trainer, p99"] == pytest.approx([0.245, None, 0.5], abs=1e-6)
    # exp(-0.5), 1 and 1 are not above 2.
    assert found["truncated_fraction"] == [0.0, None, 0.0]


def test_files_of_another_training_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    loss_of(PROXIMAL.clone().requires_grad_(), records=True)
    with pytest.raises(SystemExit, match="remove its workspace"):
        drift_by_update(FOLDER, [3], dimensions=1)
