"""Which GPUs there are, without a library that would take hold of them."""

import os
from pathlib import Path


def visible_gpus() -> tuple[str, ...]:
    """Returns CUDA_VISIBLE_DEVICES, or the machine's NVIDIA devices; empty on a CPU machine."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(each.strip() for each in chosen.split(",") if each.strip())
    devices = Path("/dev").glob("nvidia[0-9]*")
    return tuple(sorted((each.name.removeprefix("nvidia") for each in devices), key=int))
