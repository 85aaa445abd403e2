"""What goes between an orchestrator and a worker: which stage of which commit, and its entry."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo.errors import ParameterError
from grpo.lineage.lock import MD5

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
MOST_BYTES = 512 * 1024  # of a flow run's parameters, for Prefect's server
ROOM_BYTES = 1024  # for the parameters that are not the order's


@dataclass(frozen=True, kw_only=True)
class Order:
    """A stage to run.

    Instance::

        Order(commit="8d1c...", stage="train@a-1",
              entries={"base": {"cmd": "python -m stages.base ...",
                                "outs": [{"path": "artifacts/policies/base", "hash": "md5",
                                          "md5": "a10....dir", "size": 93, "nfiles": 3}]}})

    Raises:
      ParameterError: If the commit is none, an out has no hash, or it is more than Prefect takes.
    """

    commit: str
    stage: str
    entries: Mapping[str, Any]  # what dvc.lock says of the outs of the stages it reads from

    def __post_init__(self) -> None:
        if not COMMIT.fullmatch(self.commit):  # git would take it for an option
            raise ParameterError(f"{self.stage}: commit must be a hash of git, got {self.commit!r}")
        digests = [out.get("md5", "") for each in self.entries.values() for out in each["outs"]]
        if not all(MD5.fullmatch(digest) for digest in digests):  # or a path
            raise ParameterError(f"{self.stage}: entries must have md5s of DVC, got {digests}")
        if len(self.text) > MOST_BYTES - ROOM_BYTES:
            raise ParameterError(
                f"{self.stage}: reads from {len(self.entries)} stages, whose outs take "
                f"{len(self.text)} bytes in dvc.lock, more than Prefect hands over; run it where "
                f"the data is: dvc pull, then dvc repro -s {self.stage}"
            )

    @property
    def text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """Returns a hash that two orders share if the same is to be done."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker hands back: the stage's entry in dvc.lock, or why there is none."""

    host: str
    outcome: str = ""  # of flows.runner.Outcome
    entry: str = ""  # "NAME: ..." as YAML
    error: str = ""
    code: int = 0
