"""A process of environments: says that it has started, then answers orders, a line for each.

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
    """Answers requests until the other side closes.

    A request is a list of orders [slot, scene or chunk of actions]; every order gets an answer of
    its own, so that the other side knows which one never came.
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
    """Returns what pool.py reads; an environment that raises has failed."""
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
    """Serves the socket of the first argument with environments of the second, "module:class".

    The third argument is what they are made with, as JSON.
    """
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[2].partition(":")
    with freezing_imports():
        found = importlib.import_module(module)
    make = partial(getattr(found, name), **json.loads(sys.argv[3]))
    serve(socket.socket(fileno=int(sys.argv[1])), make)


if __name__ == "__main__":
    main()
