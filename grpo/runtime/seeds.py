"""Seeds derived from the run's seed and a name: every part has its own random stream."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed for one part of a run."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
