"""Messages between the orchestrator and a worker: the order for a stage, and the answer."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo.errors import ParameterError
from grpo.lineage.lock import MD5

COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
MOST_BYTES = 512 * 1024  # Prefect's limit for the parameters of a flow run
ROOM_BYTES = 1024  # reserved for parameters outside the order


@dataclass(frozen=True, kw_only=True)
class Order:
    """A request to run one stage of a commit.

    Instance::

        Order(commit="8d1c...", stage="train@a-1",
              entries={"base": {"cmd": "python -m stages.base ...",
                                "outs": [{"path": "artifacts/policies/base", "hash": "md5",
                                          "md5": "a10....dir", "size": 93, "nfiles": 3}]}})

    Raises:
      ParameterError: If the commit is not a git hash, an out has no md5, or the order exceeds
        Prefect's limit.
    """

    commit: str
    stage: str
    entries: Mapping[str, Any]  # entries of the upstream stages in dvc.lock: commands and outs

    def __post_init__(self) -> None:
        if not COMMIT.fullmatch(self.commit):  # git could read it as an option
            raise ParameterError(f"{self.stage}: commit must be a hash of git, got {self.commit!r}")
        digests = [out.get("md5", "") for each in self.entries.values() for out in each["outs"]]
        if not all(MD5.fullmatch(digest) for digest in digests):  # it could be a path
            raise ParameterError(f"{self.stage}: entries must have md5s of DVC, got {digests}")
        if len(self.text) > MOST_BYTES - ROOM_BYTES:
            raise ParameterError(
                f"{self.stage}: reads from {len(self.entries)} stages, whose outs take "
                f"{len(self.text)} bytes in dvc.lock, more than Prefect allows; run the stage "
                f"where the data is: dvc pull, then dvc repro -s {self.stage}"
            )

    @property
    def text(self) -> str:
        """Returns the order as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """Returns a hash of the order, used as idempotency key."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A worker's result: the stage's entry in dvc.lock, or the error."""

    host: str
    outcome: str = ""  # of flows.runner.Outcome
    entry: str = ""  # "NAME: ..." as YAML
    error: str = ""
    code: int = 0
