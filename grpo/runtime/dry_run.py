"""Runs code on tensors without content, to count the memory that it would allocate on the host."""

import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_COMPUTED = 2**20  # elements; larger results of real tensors have no content either
SMALLEST_SUM = 2**10  # elements of arguments; results of fewer are computed
_SCALAR = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default
_INDEX = torch.ops.aten.index.Tensor
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


class _Memory:
    """The memory of a storage, freed with the last tensor that uses it."""

    def __init__(self, run: "DryRun", size: int) -> None:
        self._run, self.size = run, size
        run.live_bytes += size
        run.peak_bytes = max(run.peak_bytes, run.live_bytes)

    def __del__(self) -> None:
        self._run.live_bytes -= self.size


class Unfilled(Tensor):
    """A tensor on the host that has a shape but no content."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    memory: _Memory

    @staticmethod
    def make(layout: "_Layout", memory: _Memory) -> "Unfilled":
        """Returns a tensor in some memory."""
        made: Any = Tensor._make_wrapper_subclass(
            Unfilled,
            layout.shape,
            strides=layout.stride,
            storage_offset=layout.offset,
            dtype=layout.dtype,
            device=torch.device("cpu"),
        )
        made.memory = memory
        unfilled: Unfilled = made
        return unfilled

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unfilled({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} needs numbers: tensors of a dry run have none outside of it")


class _Layout(NamedTuple):
    """Where a result of an operation lies, and how."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size: int  # bytes of its storage
    shares: int | None  # the number of the argument whose memory it shares


class DryRun(TorchDispatchMode):
    """Counts the bytes of tensors while code runs within, and computes no large tensor.

    Parameters of `place`d modules have no content, and neither has what is computed of them. Other
    tensors are computed up to LARGEST_COMPUTED elements, so that lengths, masks and indices are as
    in a real run. Numbers that code reads from a tensor without content are 0, and two such tensors
    count as equal. Kernels' own scratch memory is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[Any, Any] = {}  # results by operation and arguments
        self._counted: set[int] = set()  # storages of tensors with content

    def peak_of(self, work: Callable[[], object]) -> int:
        """Returns the largest number of bytes that are live while work runs within."""
        self.peak_bytes = self.live_bytes
        with self:
            work()
        return self.peak_bytes

    def place(self, module: nn.Module) -> None:
        """Replaces parameters and buffers by tensors without content; integers become zeros."""
        placed: dict[int, Tensor] = {}
        for each in module.modules():
            holders: list[dict[str, Any]] = [each._parameters, each._buffers]
            for held in holders:
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in placed:
                            placed[id(tensor)] = self._place(tensor)
                        held[name] = placed[id(tensor)]

    def _place(self, tensor: Tensor) -> Tensor:
        made: Tensor
        if tensor.dtype.is_floating_point:
            made = self._make(_layout_of(tensor, None), [])
        else:
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
            self._count(made)
        if isinstance(tensor, nn.Parameter):
            with self:
                return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors of inference mode and others could not share memory.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._dispatch(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(type(each) is Unfilled for each in tensors):
            large = self._find_large(func, args, kwargs, tensors)
            if large is not None:
                return self._fill(large, tensors)
            out = func(*args, **kwargs)
            for each in _tensors([out]):
                self._count(each)
            return out
        elif func is _SCALAR:
            return 0.0 if args[0].dtype.is_floating_point else 0
        elif func is _EQUAL:
            return True
        elif func is _INDEX:
            args = (args[0], _without_masks(args[1]))
            tensors = list(_tensors(args))
        written = kwargs["out"] if "out" in kwargs else args[0] if _writes(func) else None
        if isinstance(written, Tensor) and type(written) is not Unfilled:
            return written  # keeps its numbers
        result = self._result(func, args, kwargs, tensors)
        if isinstance(written, Tensor):
            return written
        return self._fill(result, tensors)

    def _find_large(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Returns the layout of a large result of tensors with content; None: it is computed.

        Matrices and vectors of integers and booleans are lengths, masks or indices, and not large.
        """
        sized = args[0] if args and isinstance(args[0], (list, tuple)) and not tensors else ()
        elements = [each.numel() for each in tensors]
        if _writes(func) or sum(elements, prod(sized) if sized else 0) <= SMALLEST_SUM:
            return None
        try:
            found = self._result(func, args, kwargs, tensors)
        except RuntimeError:  # its shape depends on numbers
            return None
        if not isinstance(found, _Layout) or prod(found.shape) <= LARGEST_COMPUTED:
            return None
        return found if len(found.shape) > 2 or found.dtype.is_floating_point else None

    def _result(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Returns the layout of an operation's result, from torch's meta kernels."""
        try:
            key = func, *map(_key, args), *((name, _key(each)) for name, each in kwargs.items())
        except TypeError:
            key = None
        if key in self._known:
            return self._known[key]
        metas = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in tensors
        ]
        left = iter(metas)
        given = _replaced(args, left)
        named = {name: _replaced(each, left) for name, each in kwargs.items()}
        if "device" in named:
            named["device"] = "meta"
        storages = {each.untyped_storage()._cdata: index for index, each in enumerate(metas)}

        def describe(out: Any) -> Any:
            if isinstance(out, Tensor):
                return _layout_of(out, storages.get(out.untyped_storage()._cdata))
            return type(out)(map(describe, out)) if isinstance(out, (list, tuple)) else out

        with torch.no_grad():
            found = describe(func(*given, **named))
        if key is not None:
            self._known[key] = found
        return found

    def _fill(self, result: Any, tensors: list[Tensor]) -> Any:
        """Returns tensors of some layouts."""
        if isinstance(result, _Layout):
            return self._make(result, tensors)
        if isinstance(result, (list, tuple)):
            return type(result)(self._fill(each, tensors) for each in result)
        return result

    def _make(self, layout: _Layout, tensors: list[Tensor]) -> Unfilled:
        shared = None if layout.shares is None else tensors[layout.shares]
        if isinstance(shared, Unfilled):
            return Unfilled.make(layout, shared.memory)
        return Unfilled.make(layout, _Memory(self, layout.size))

    def _count(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor with content, once."""
        if type(tensor) is Unfilled:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._counted:
            self._counted.add(address)
            memory = _Memory(self, storage.nbytes())
            weakref.finalize(storage, self._forget, address, memory)

    def _forget(self, address: int, memory: _Memory) -> None:
        self._counted.discard(address)
        del memory


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _replaced(value: Any, left: Iterator[Tensor]) -> Any:
    """Returns a value with its tensors replaced in order."""
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, (list, tuple)):
        return [_replaced(each, left) for each in value]
    return value


def _layout_of(tensor: Tensor, shares: int | None) -> _Layout:
    size = tensor.untyped_storage().nbytes()
    shape, stride = tuple(tensor.shape), tensor.stride()
    return _Layout(shape, stride, int(tensor.storage_offset()), tensor.dtype, size, shares)


def _key(value: Any) -> Any:
    """Returns what of an argument decides the layout of a result."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if not isinstance(value, _PLAIN):
        raise TypeError
    return type(value), value


def _writes(func: Any) -> bool:
    """Returns whether an operation writes into its first argument."""
    arguments = func._schema.arguments
    return bool(arguments and arguments[0].alias_info and arguments[0].alias_info.is_write)


def _without_masks(indices: Any) -> list[Any]:
    """Returns indices with masks that have content as the positions of their true entries."""
    found: list[Any] = []
    for each in indices:
        is_mask = isinstance(each, Tensor) and each.dtype == torch.bool
        found += each.nonzero().unbind(1) if is_mask and type(each) is not Unfilled else [each]
    return found
