"""The laws of a robot's policy on a GPU: run with `pytest -m gpu`."""

import pytest
import torch

from tests.modalities.tiny import seeded
from tests.modalities.tiny_actor import SCENES, tiny_actor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_chunks_are_scored_on_a_gpu_as_they_were_drawn_there_and_are_on_the_cpu():
    with tiny_actor() as actor:
        actor.model.to("cuda")
        trajectory, sampled = actor.sample(SCENES, group_sizes=[3, 2, 2], generator=seeded())
        with torch.no_grad():
            on_gpu = actor.log_prob(trajectory)
            actor.model.to("cpu")
            on_cpu = actor.log_prob(trajectory)
    torch.testing.assert_close(on_gpu, sampled, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(on_cpu, on_gpu, atol=1e-4, rtol=1e-4)
