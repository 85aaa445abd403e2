"""A process of environments: answers orders over a socket, one JSON line per slot.

Started by `grpo.simulation.pool`; ends when the socket closes.
"""

import importlib
import json
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

from grpo.simulation.base import Ending, Environment, act, begin


def serve(connection: socket.socket, make: Callable[[], Environment]) -> None:
    """Answers requests until the other side closes.

    A request is a list of orders [slot, scene or chunk of actions]; every order gets an answer of
    its own, so that the other side knows which one never came.
    """
    slots: dict[int, Environment] = {}
    with connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            for slot, order in json.loads(line):
                lines.write(json.dumps([slot, *_answer(slots, slot, order, make)]) + "\n")
                lines.flush()


def _answer(
    slots: dict[int, Environment], slot: int, order: Any, make: Callable[[], Environment]
) -> list[Any]:
    """Returns observation, executed actions and ending; an environment that raises has failed."""
    try:
        if slot not in slots:
            slots[slot] = make()
        does = begin if isinstance(order, str) else act
        observation, executed, ending = does(slots[slot], order)
    except Exception:  # noqa: BLE001  the rollout boundary: a simulator may raise anything
        slots.pop(slot, None)
        return [[], 0, Ending.FAILED]
    return [observation.tolist(), executed, ending]


def main() -> None:
    """Serves the socket of the first argument with environments of the second, "module:class"."""
    warnings.simplefilter("ignore")
    module, _, name = sys.argv[2].partition(":")
    serve(socket.socket(fileno=int(sys.argv[1])), getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main()
