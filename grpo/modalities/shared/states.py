"""Bytes of weights and of what an optimizer keeps, of one rank of several."""

PRECISE_BYTES = 4  # per number of copies, gradients and each of AdamW's two moments: float32
GATHERED_BLOCKS = 2  # by FSDP2: the current block and the prefetched one


def state_bytes(trained: int, *, itemsize: int, ranks: int, frozen: int = 0) -> dict[str, float]:
    """Returns the bytes that a rank keeps between passes, by content.

    Args:
      trained: Number of trained parameters; `frozen` ones have weights only.
      itemsize: Bytes of a weight. Weights of less than float32 have float32 copies, to which their
        gradients are moved.
    """
    own = trained / ranks
    return {
        "weights": itemsize * (own + frozen / ranks),
        "copies": PRECISE_BYTES * own if itemsize < PRECISE_BYTES else 0.0,
        "gradients": PRECISE_BYTES * own,
        "moments": 2 * PRECISE_BYTES * own,
    }


def gathered_bytes(block: int, root: int, *, itemsize: int) -> dict[str, float]:
    """Returns the bytes of complete weights and gradients on a rank during a pass, by content.

    Args:
      block: Number of parameters of a block.
      root: Number of parameters outside of the blocks, which stay complete during the pass.
    """
    return {
        "gathered blocks": GATHERED_BLOCKS * itemsize * block,
        # Before the reduction, and in it.
        "a block's gradient": (itemsize + PRECISE_BYTES) * block,
        "embeddings and head, with gradients": 2 * itemsize * root,
    }
