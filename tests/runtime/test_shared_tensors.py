"""Tensors in memory that other processes read."""

import gc
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo.runtime.shared_tensors import SharedTensors

KINDS = (torch.bfloat16, torch.float64, torch.bool, torch.float16, torch.int32, torch.uint8)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of odd sizes, so that numbers of eight bytes need their place."""
    kinds = {str(kind): (torch.rand(3, 3) * 9).to(kind) for kind in KINDS}
    odd = {"none": torch.zeros(0, 3), "number": torch.tensor(3), "turned": torch.rand(2, 3).T}
    return {**kinds, **odd, "weight": torch.rand(5, requires_grad=True)}


def test_they_are_safetensors_that_change_in_place(tensors: dict[str, Tensor]):
    shared = SharedTensors(tensors)
    for expected in (tensors, {name: each + each for name, each in tensors.items()}):
        shared.write(expected)
        found = load_file(shared.path)
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            assert found[name].dtype == each.dtype
            assert torch.equal(found[name], each)


def test_other_processes_read_them():
    shared = SharedTensors({"number": torch.tensor(3)})
    shared.write({"number": torch.tensor(4)})
    code = "import sys; from safetensors.torch import load_file as load; print(load(sys.argv[1]))"
    read = [sys.executable, "-c", code, str(shared.path)]
    found = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    assert found == "{'number': tensor(4)}\n"


def test_their_memory_is_freed_with_them(tensors: dict[str, Tensor]):
    shared = SharedTensors(tensors)
    path = shared.path
    assert path.exists()
    del shared
    gc.collect()
    assert not path.exists()
