"""How much a backward pass has to remember."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """What autograd has saved so far, each tensor's memory counted once, parameters not."""

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._known = {each.untyped_storage().data_ptr() for each in held}
        self.total = 0

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's memory, and returns it without its graph.

        An operation that saves its own output would else hold itself forever.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Yields what the block's forward passes save for their backward passes.

    The block must keep their outputs: memory that is given back may be counted again.
    """
    saved = SavedBytes(model)
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved
