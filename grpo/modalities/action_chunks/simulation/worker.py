"""A simulator process: reports its start, then answers each order with one line.

Started by `grpo.modalities.action_chunks.simulation.pool`; ends when the socket closes.
"""

import base64
import importlib
import json
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo.modalities.action_chunks.simulation.base import Ending, Environment, act, begin
from grpo.runtime.process import freezing_imports


def serve(connection: socket.socket, make: Callable[[], Environment]) -> None:
    """Answers requests until the connection closes.

    A request is a list of orders [slot, scene or chunk of actions]. Every order gets its own
    answer, so that the pool can tell which answer is missing.
    """
    slots: dict[int, Environment] = {}
    with connection.makefile("rw", encoding="utf-8") as lines:
        lines.write("started\n")
        lines.flush()
        for line in lines:
            for slot, order in json.loads(line):
                lines.write(json.dumps([slot, *_answer(slots, slot, order, make)]) + "\n")
                lines.flush()


def _answer(
    slots: dict[int, Environment], slot: int, order: Any, make: Callable[[], Environment]
) -> list[Any]:
    """Returns the answer in the form that pool.py reads; an exception becomes Ending.FAILED."""
    try:
        if slot not in slots:
            slots[slot] = make()
        does = begin if isinstance(order, str) else act
        moment = does(slots[slot], order)
    except Exception:  # noqa: BLE001  the rollout boundary: a simulator may raise anything
        slots.pop(slot, None)
        return [[], 0, Ending.FAILED, ""]
    picture = base64.b64encode(moment.picture.tobytes()).decode()
    return [moment.observation.tolist(), moment.executed, moment.ending, picture]


def main() -> None:
    """Serves environments on a socket.

    Arguments: file descriptor of the socket, class "module:class", its keyword arguments as JSON.
    """
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[2].partition(":")
    with freezing_imports():
        found = importlib.import_module(module)
    make = partial(getattr(found, name), **json.loads(sys.argv[3]))
    serve(socket.socket(fileno=int(sys.argv[1])), make)


if __name__ == "__main__":
    main()
