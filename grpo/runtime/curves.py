"""Curves of arms in MLflow, which grow while rounds train; kept in files until MLflow has them.

A stage that trains writes its updates to `.runs/curves/ROUND.json` after every iteration. If
MLFLOW_TRACKING_URI is a server, it sends the new ones at once, to one MLflow run per arm. What the
server misses, and everything without a server, is written when the lineage is recorded.
"""

import base64
import hashlib
import json
import math
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from grpo.errors import brief
from grpo.runtime.artifacts.files import locked
from grpo.runtime.artifacts.usage import USAGE

CURVES = USAGE / "curves"
LOCK = CURVES / ".lock"  # of what MLflow has
EXPERIMENT = "grpo"  # in MLflow
ARM, KEY = "arm", "curve"  # tags of runs
METRICS_PER_CALL = 900  # MLflow accepts at most 1000 entities per call
ANSWER_SECONDS = 2.0  # of a server, which training waits for
PAUSE_SECONDS = 10.0  # after a server has not answered
API = "/api/2.0/mlflow"


class Point(NamedTuple):
    """The numbers of one update."""

    update: int  # from the base policy, over all rounds of the arm
    time_ms: int  # since 1970
    values: dict[str, float]


class Curve(BaseModel):
    """The content of a round's file."""

    arm: str
    round: str
    key: str  # differs between trainings of the round on other inputs
    before: str | None  # the arm's round that it starts from; None: another policy
    points: list[Point] = []
    # What MLflow has:
    store: str | None = None  # hash of the tracking URI
    run: str | None = None
    sent: int = 0  # points
    continued_by: str | None = None  # key of the training that goes on with the same run

    def of_store(self, uri: str) -> "Curve":
        """Returns the curve as a store knows it: another one has nothing of it."""
        store = hashlib.sha256(uri.encode()).hexdigest()[:16]
        if self.store == store:
            return self
        nothing = {"store": store, "run": None, "sent": 0, "continued_by": None}
        return self.model_copy(update=nothing)


class Tracker(Protocol):
    """What MLflow is asked for; raises OSError if it does not answer."""

    def make_run(self, arm: str, key: str, start_ms: int) -> str:
        """Returns the run with the tag KEY, which is created if it is not there."""

    def log(self, run: str, points: Sequence[Point]) -> None:
        """Adds points; those that the run has already stay as they are."""


class RoundCurve:
    """The curve of a round that is being trained."""

    def __init__(self, *, arm: str, name: str, key: str, before: str | None) -> None:
        """Goes on with the file of the same training.

        Args:
          before: The round of the same arm that this one starts from.
        """
        there = read_curve(name)
        if there is None or there.key != key:
            there = Curve(arm=arm, round=name, key=key, before=before)
        self._curve = there
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        is_server = self._uri.startswith(("http://", "https://"))
        self._server = Server(self._uri) if is_server else None
        self._rests_until = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether a server has not got all points."""
        return self._server is not None and self._curve.sent < len(self._curve.points)

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Stores the rows of updates.csv so far, and sends the new ones; never fails."""
        now = time.time_ns() // 1_000_000
        known = {each.update: each.time_ms for each in self._curve.points}
        self._curve.points = [
            Point(row["update"], known.get(row["update"], now), _numbers(row)) for row in rows
        ]
        try:
            write_curve(self._curve)
            if self._server and time.monotonic() >= self._rests_until:
                with locked(LOCK):
                    self._curve = send(self._curve, self._server, self._uri)
        except (OSError, ValueError):  # of the disk, the server, or the URI
            self._rests_until = time.monotonic() + PAUSE_SECONDS


def send(curve: Curve, tracker: Tracker, uri: str) -> Curve:
    """Sends the points that a store does not have yet; returns the curve with what it has now.

    A round goes on with the run of the round before, unless another training has done so; then a
    new run gets the points of the rounds before, too.

    Raises:
      OSError: If MLflow does not answer; what it has is noted in the files.
    """
    curve = curve.of_store(uri)
    run = curve.run
    if run is None:
        earlier = [each.of_store(uri) for each in _earlier(curve)]
        last = earlier[-1] if earlier else None
        run = _run_to_continue(last, curve.key) if last else None
        if run is None:
            first = (earlier or [curve])[0].points[0]
            run = tracker.make_run(curve.arm, curve.key, first.time_ms)
            for each in earlier:
                tracker.log(run, each.points)
        if last:
            write_curve(last.model_copy(update={"continued_by": curve.key}))
        curve.run = run
        write_curve(curve)
    if curve.sent < len(curve.points):
        tracker.log(run, curve.points[curve.sent :])
        curve.sent = len(curve.points)
        write_curve(curve)
    return curve


def _run_to_continue(last: Curve, key: str) -> str | None:
    """Returns the run of the round before; None if it lacks points or another training has it."""
    is_free = last.sent == len(last.points) and last.continued_by in (None, key)
    return last.run if is_free else None


def _earlier(curve: Curve) -> list[Curve]:
    """Returns the curves of the arm's rounds before, the first one first."""
    found = list[Curve]()
    while curve.before is not None:
        before = read_curve(curve.before)
        if before is None or before.arm != curve.arm or not before.points:
            break
        found.insert(0, before)
        curve = before
    return found


def run_name(arm: str) -> str:
    """Returns the name of the run with an arm's curve."""
    return f"arm {arm}"


def filter_of(arm: str, key: str) -> str:
    """Returns the filter for the run of an arm's training."""
    return f"tags.{ARM} = '{arm}' AND tags.{KEY} = '{key}'"


def curve_path(name: str) -> Path:
    """Returns the file of a round's curve."""
    return CURVES / f"{name}.json"


def read_curve(name: str) -> Curve | None:
    """Returns the curve of a round; None if there is no such file, or it is none."""
    try:
        return Curve.model_validate_json(curve_path(name).read_bytes())
    except (OSError, ValidationError):
        return None


def write_curve(curve: Curve) -> None:
    """Replaces the file of a curve; a kill leaves the old or the new one."""
    path = curve_path(curve.round)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(curve.model_dump_json().encode())
    part.replace(path)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a row but its index."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "update" and math.isfinite(value)
    }


class Server:
    """An MLflow server by its REST interface: importing mlflow takes seconds.

    Its methods raise OSError if it does not answer, or not as MLflow does, and ValueError if its
    URI is none.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    @cached_property
    def _address(self) -> tuple[str, dict[str, str]]:
        """The URI without an account, and the headers, which have it."""
        parts = urlsplit(self._uri)
        headers = {"Content-Type": "application/json", **_authorization(parts)}
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), headers

    @cached_property
    def _context(self) -> ssl.SSLContext | None:
        if not self._uri.startswith("https"):
            return None
        return ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))

    def make_run(self, arm: str, key: str, start_ms: int) -> str:
        """Returns the run of a training, in the experiment, which is created if necessary."""
        experiment = self._experiment()
        where = {"experiment_ids": [experiment], "filter": filter_of(arm, key)}
        found = self._ask("POST", "/runs/search", where).get("runs")
        if found:
            return _text_in(found, 0, "info", "run_id")
        body = {
            "experiment_id": experiment,
            "run_name": run_name(arm),
            "start_time": start_ms,
            "tags": [{"key": ARM, "value": arm}, {"key": KEY, "value": key}],
        }
        return _text_in(self._ask("POST", "/runs/create", body), "run", "info", "run_id")

    def log(self, run: str, points: Sequence[Point]) -> None:
        """Adds points; those that the run has already stay as they are."""
        metrics = [
            {"key": key, "value": value, "timestamp": each.time_ms, "step": each.update}
            for each in points
            for key, value in each.values.items()
        ]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            part = metrics[start : start + METRICS_PER_CALL]
            self._ask("POST", "/runs/log-batch", {"run_id": run, "metrics": part})

    def _experiment(self) -> str:
        query = urlencode({"experiment_name": EXPERIMENT})
        try:
            found = self._ask("GET", f"/experiments/get-by-name?{query}")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            created = self._ask("POST", "/experiments/create", {"name": EXPERIMENT})
            return _text_in(created, "experiment_id")
        return _text_in(found, "experiment", "experiment_id")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        uri, headers = self._address
        request = urllib.request.Request(
            f"{uri}{API}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(
                request, timeout=ANSWER_SECONDS, context=self._context
            ) as answer:
                found = json.load(answer)
        except HTTPException as error:
            raise OSError(brief(error)) from None
        if not isinstance(found, dict):
            raise OSError(f"must answer as MLflow does, got {brief(found)}")
        return found


def _text_in(answer: Any, *path: str | int) -> str:
    """Returns the text at a path of names and positions.

    Raises:
      OSError: If there is none: the server is no MLflow.
    """
    found = answer
    for each in path:
        try:
            found = found[each]
        except (LookupError, TypeError):
            raise OSError(f"must answer as MLflow does, got {brief(answer)}") from None
    return str(found)


def _authorization(uri: SplitResult) -> dict[str, str]:
    """Returns the header for the account in the URI or in MLflow's environment variables."""
    user, password = uri.username, uri.password
    if user is not None:
        user, password = unquote(user), unquote(password or "")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    else:
        user = os.environ.get("MLFLOW_TRACKING_USERNAME")
        password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if user is None:
        return {}
    account = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {account}"}
