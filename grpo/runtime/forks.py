"""Runs work in processes of this machine that train together, and ends them together."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from grpo.errors import GrpoError, LostRankError, brief
from grpo.runtime.artifacts.files import refused_by_the_system
from grpo.runtime.artifacts.usage import Usage
from grpo.runtime.process import die_with_parent

EXIT_WRONG_INPUT = 2  # of a rank that has told its parent what is wrong
EXIT_LOST_OTHERS = 3  # of a rank that cannot reach another one, most often because that has ended
TRANSPORTS = ("gloo", "NCCL")  # as they name themselves in what they raise


def run_in_ranks(
    number: int,
    work: Callable[[Usage], None],
    usage: Usage,
    *,
    store: Path,
) -> None:
    """Does the work in `number` processes; here, if that is one, or if torchrun has started this.

    They are forks: what this process has imported they need not import again.

    Args:
      store: The file by which they find each other.

    Raises:
      GrpoError: What a rank says of wrong input.
      LostRankError: If a rank is killed or fails; the others are ended at once.
    """
    if number == 1 or "RANK" in os.environ:
        work(usage)
        return
    store.unlink(missing_ok=True)
    context, here = multiprocessing.get_context("fork"), os.getpid()
    processes, listeners = [], []
    for rank in range(number):
        listener, speaker = context.Pipe(duplex=False)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
        process = context.Process(
            target=_be_rank, args=(own, here, work, usage, speaker), daemon=True
        )
        process.start()
        speaker.close()
        processes.append(process)
        listeners.append(listener)
    codes = _codes_once_over(processes)
    store.unlink(missing_ok=True)
    for listener, code in zip(listeners, codes):
        if code == EXIT_WRONG_INPUT:
            raise GrpoError(listener.recv_bytes().decode())
    if any(codes):
        raise LostRankError(_what_was_lost(codes, listeners))
    usage.seconds_by_part |= json.loads(listeners[0].recv_bytes())


def _be_rank(
    own: dict[str, str],
    parent: int,
    work: Callable[[Usage], None],
    usage: Usage,
    speaker: Connection,
) -> None:
    """Does the work as one rank, and tells what is wrong with the input, or how long parts took."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its ranks
    # They listen on loopback only: nobody else is to reach them.
    os.environ |= {**own, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ.pop("MASTER_ADDR", None)  # of a torchrun that has not started these
    try:
        with refused_by_the_system():
            work(usage)
    except GrpoError as error:
        speaker.send_bytes(str(error).encode())
        sys.exit(EXIT_WRONG_INPUT)
    except RuntimeError as error:
        if not any(name in str(error) for name in TRANSPORTS):
            raise
        speaker.send_bytes(brief(error).encode())
        sys.exit(EXIT_LOST_OTHERS)
    speaker.send_bytes(json.dumps(usage.seconds_by_part).encode())


def _codes_once_over(processes: Sequence[ForkProcess]) -> list[int]:
    """Returns exit codes once all have ended or one has failed; the rest is then killed, code 0."""
    try:
        while running := [each.sentinel for each in processes if each.exitcode is None]:
            if any(each.exitcode for each in processes):
                break
            wait(running)
        return [each.exitcode or 0 for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.join()


def _what_was_lost(codes: Sequence[int], listeners: Sequence[Connection]) -> str:
    """Returns which rank ended, and how; one that ended because another did only if none else."""
    found = [rank for rank, code in enumerate(codes) if code]
    rank = next((each for each in found if codes[each] != EXIT_LOST_OTHERS), found[0])
    if codes[rank] < 0:
        how = f"was killed by {signal.Signals(-codes[rank]).name}"
    elif codes[rank] == EXIT_LOST_OTHERS:
        how = f"lost the others ({listeners[rank].recv_bytes().decode()})"
    else:
        how = "failed"
    return (
        f"rank {rank} of {len(codes)} {how}, and all were ended; run the stage again, it goes on "
        "from its last checkpoint"
    )
