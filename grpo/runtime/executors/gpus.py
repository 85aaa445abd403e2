"""Which GPUs there are, without a library that would take hold of them."""

import os
from itertools import takewhile
from pathlib import Path

DEVICES = Path("/dev")


def visible_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """Returns CUDA_VISIBLE_DEVICES up to a -1, or the machine's NVIDIA devices; CPU only: none.

    CUDA counts from 0 what a container is given; the numbers of the files are the host's.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*")))
    named = (each.strip() for each in chosen.split(","))
    return tuple(each for each in takewhile(lambda each: each != "-1", named) if each)
