"""Tensors in a file in memory that other processes of the same user read as safetensors."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from grpo.runtime.artifacts.tensors import SAFETENSORS_TYPES
from grpo.runtime.memory import MemoryFile


class SharedTensors:
    """Named tensors in a file in memory, to be changed in place.

    A new file for new values would need new pages, which take longer than the copy.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Args:
        like: Tensors of the same names, shapes and types, which may be divided over ranks; their
          values are not copied.
        """
        header, end = dict[str, Any](), 0
        # The order of safetensors: a tensor begins at a multiple of the size of its numbers.
        for name in sorted(like, key=lambda name: (-like[name].itemsize, name)):
            shape, kind = [*like[name].shape], like[name].dtype
            start, end = end, end + prod(shape) * kind.itemsize
            dtype = SAFETENSORS_TYPES[kind]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        content = json.dumps(header).encode()
        content += b" " * (-len(content) % 8)
        content = len(content).to_bytes(8, "little") + content
        size = len(content) + end

        def write(file: BinaryIO) -> None:
            file.write(content)
            file.truncate(size)

        self._file = MemoryFile(write)
        self.path = self._file.path
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        data = mapped[len(content) :]
        self.tensors = {
            name: data[slice(*about["data_offsets"])].view(like[name].dtype).view(about["shape"])
            for name, about in header.items()
        }

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies other values into all tensors."""
        for name, target in self.tensors.items():
            target.copy_(tensors[name])
