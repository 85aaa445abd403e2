"""Seeds derived from the run's seed and a name: every part has its own random stream."""

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed for one part of a run."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def iteration_seed(seed: int, purpose: str, name: str, index: int) -> int:
    """Returns the seed of an iteration of a round; that of the first has no index in its name."""
    return derive_seed(seed, purpose, name, *([index] if index else []))
