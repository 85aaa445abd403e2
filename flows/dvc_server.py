"""A process that has imported DVC and forks a launcher with `dvc` for each stage.

Started as `python -m flows.dvc_server CONTROL LISTENER`; see `grpo/runtime/fork_server.py`.
"""

import argparse
import gc
import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

from flows.launcher import launch, prepare_command
from grpo.runtime import fork_server
from grpo.runtime.fork_server import Request, end, replace_environment, serve

# What `dvc repro` imports when it runs.
MODULES = (
    *("dvc._debug", "dvc.cachemgr", "dvc.cli.parser", "dvc.commands.repro", "dvc.data_cloud"),
    *("dvc.lock", "dvc.repo.artifacts", "dvc.repo.datasets", "dvc.repo.metrics"),
    *("dvc.repo.open_repo", "dvc.repo.params", "dvc.repo.plots", "dvc.repo.reproduce"),
    *("dvc.repo.stage", "dvc.rwlock", "dvc.scm", "dvc.stage.cache", "dvc.utils.strictyaml"),
    *("dvc_data.hashfile.db.local", "dvc_data.hashfile.status", "fsspec.implementations.memory"),
    *("configobj", "dulwich.ignore", "dulwich.index", "pyparsing", "ruamel.yaml"),
)


def run_dvc(request: Request, descriptors: list[int], connection: socket.socket) -> NoReturn:
    """Makes this forked process a launcher and runs `dvc` below it.

    The launcher keeps the connection: it is closed when all processes of the stage have ended.
    """
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, each in enumerate((nothing, descriptors[0], descriptors[0])):
        os.dup2(each, target)
    os.chdir(request["cwd"])
    replace_environment(request["environment"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)

    def become() -> NoReturn:
        connection.close()
        prepare_command()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["dvc", *request["arguments"]]
        end(_dvc)

    code = launch(
        become,
        parent=fork_server.preloaded_process,
        may_finish=True,
        grace_seconds=request["grace_seconds"],
    )
    os._exit(code)


def _dvc() -> None:
    from dvc.cli import main

    sys.exit(main(sys.argv[1:]))


def main() -> None:
    """Imports DVC and serves until the control socket is closed."""
    parser = argparse.ArgumentParser(prog="python -m flows.dvc_server", description=__doc__)
    parser.add_argument("control", type=int, help="descriptor of a socket; its end is the end")
    parser.add_argument("listener", type=int, help="descriptor of the socket of requests")
    given = parser.parse_args()
    gc.disable()  # imports create many objects and no garbage
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    serve(given.control, given.listener, run_dvc, lambda request: None, lost=signal.SIGTERM)


if __name__ == "__main__":
    main()
