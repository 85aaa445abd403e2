"""Memory that a backward pass needs is counted once, and given back."""

import weakref

import torch
from torch import nn

from grpo.modalities.shared.recomputation import saved_bytes


def test_each_tensor_that_is_saved_counts_once_and_parameters_do_not():
    layer = nn.Linear(4, 3, bias=False)
    values = torch.ones(2, 4)
    with saved_bytes(layer) as saved:
        output = layer(values).exp().sum() + layer(values).sum()
    assert saved.total == values.nbytes + 2 * 3 * 4  # what exp saves is its output
    output.backward()
    expected = values.T @ (values @ layer.weight.T).exp() + values.sum(dim=0)[:, None]
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, expected.T)


def test_what_was_saved_is_given_back_with_its_graph():
    """exp saves its own output: held with its graph, it would hold itself."""
    start = torch.ones(2, requires_grad=True)
    with saved_bytes(nn.Identity()):
        output = start.exp()
    held = weakref.ref(output)
    del output
    assert held() is None
