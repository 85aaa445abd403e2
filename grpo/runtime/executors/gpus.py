"""Lists GPUs without initializing CUDA."""

import os
from itertools import takewhile
from pathlib import Path

DEVICES = Path("/dev")


def visible_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """Returns the entries of CUDA_VISIBLE_DEVICES before a -1, else the NVIDIA devices in /dev.

    Without CUDA_VISIBLE_DEVICES the indices start at 0, as in CUDA: inside a container the
    numbers of the device files are those of the host.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*")))
    named = (each.strip() for each in chosen.split(","))
    return tuple(each for each in takewhile(lambda each: each != "-1", named) if each)
