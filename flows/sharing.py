"""Sharing of results through DVC's remote: set-up of a team's own remote, and dvc push."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dvc.repo import Repo

from flows.planning import Hints, Step
from flows.runner import Runner
from flows.server import BUCKET
from grpo.errors import ParameterError

PUSH = "push"
RETRIES = 2


class Remote(NamedTuple):
    name: str
    url: str


OWN = Remote("team", f"s3://{BUCKET}/dvc")  # for a clone without a remote of its own


def remote_of(workspace: Path) -> Remote | None:
    """Returns DVC's default remote, if there is one."""
    with Repo(str(workspace)) as repo:
        name = repo.config["core"].get("remote")
        return name and Remote(name, str(repo.config["remote"].get(name, {}).get("url")))


def use_store(workspace: Path, address: str) -> None:
    """Makes S3 at `address` the default remote of this clone, in .dvc/config.local."""
    with Repo(str(workspace)) as repo, repo.config.edit("local") as config:
        config["core"]["remote"] = OWN.name
        config["remote"][OWN.name] = {
            "url": OWN.url,
            "endpointurl": address,
            "allow_anonymous_login": True,
            "verify": True,  # check the hash of every download
        }


def require_remote(workspace: Path) -> None:
    """Raises ParameterError unless there is a remote to push to."""
    if remote_of(workspace) is None:
        raise ParameterError(
            ".dvc/config: core.remote must name where to push; run dvc remote add --default NAME "
            "URL, or set the deployment's parameter push to false"
        )


class Push(Runner):
    """Runs `dvc push` like a stage: with log capture, retries and clean stop."""

    def __init__(
        self, workspace: Path, stages: Sequence[str], *, show: Callable[[str, str], None]
    ) -> None:
        super().__init__(workspace, at_once=1, show=show)
        self.stages = stages

    def command(self, step: Step) -> list[str]:
        return [sys.executable, "-m", "dvc", "--wait-for-lock", PUSH, *self.stages]

    def run(self) -> float:
        """Pushes the outputs of the stages to DVC's remote; returns the duration in seconds.

        Raises:
          StageError: If the push fails.
        """
        step = Step(name=PUSH, upstream=(), hints=Hints(retries=RETRIES), is_changed=True)
        return self.run_stage(step).seconds
