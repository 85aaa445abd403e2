"""Two GPUs, one rank on each, train what one GPU trains: run with `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from tests.pipeline.processes import start_function
from tests.pipeline.test_ranks import RELATIVE, difference, tensors
from tests.pipeline.trained_in_ranks import ROUNDS, train_both

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_two_gpus_end_with_the_weights_and_moments_of_one(tmp_path: Path):
    process = start_function(train_both, tmp_path, tuple(ROUNDS), "cuda")
    process.join()
    assert process.exitcode == 0
    for name in ROUNDS:
        one, two = (tensors(tmp_path / each / name) for each in ("one", "two"))
        assert difference(two, one) < max(1e-4, RELATIVE[ROUNDS[name].weights]), name
