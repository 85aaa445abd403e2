"""What a registry or a remote says is checked before anything is written."""

import hashlib
import json
import time
from pathlib import Path

import pytest

from grpo.errors import ArtifactError
from grpo.lineage.lock import cached_path
from grpo.lineage.record import open_store
from grpo.registry.gate import CHAMPION
from grpo.registry.store import POINTER
from grpo.registry.weights import load_version

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
MODEL = "solver"  # as conftest.py registers it


def point_to(root: Path, pointer: object) -> None:
    """Registers a champion with a pointer of its own, as who can write to MLflow may."""
    client = open_store(root)
    place = (root / "own").as_uri()
    run = client.create_run(client.create_experiment(str(time.time_ns()), artifact_location=place))
    client.log_dict(run.info.run_id, pointer, POINTER)
    client.log_artifact(run.info.run_id, str(root / "params.yaml"))
    made = client.create_model_version(MODEL, run.info.artifact_uri, run_id=run.info.run_id)
    client.set_registered_model_alias(MODEL, CHAMPION, made.version)


def store(root: Path, content: bytes, ending: str = "") -> str:
    """Puts content into DVC's cache under its own hash; returns its digest."""
    digest = hashlib.md5(content).hexdigest() + ending
    path = cached_path(root, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return digest


def refusal(target: Path) -> str:
    """Returns why the champion is not loaded, after nothing was written."""
    before = set(target.parent.rglob("*"))
    with pytest.raises(ArtifactError) as error:
        load_version(f"models:/{MODEL}@{CHAMPION}", target)
    assert set(target.parent.rglob("*")) == before
    return str(error.value)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", ""])
def test_a_listing_that_names_what_lies_outside_is_refused(
    workspace: Path, tmp_path: Path, name: str
):
    listed = [{"md5": store(workspace, b"content"), "relpath": name}]
    digest = store(workspace, json.dumps(listed).encode(), ".dir")
    point_to(workspace, {"policy": {"digest": digest}, "base": {"digest": digest}})
    (tmp_path / "out").mkdir()
    said = refusal(tmp_path / "out" / "loaded")
    assert f"a file must lie inside its directory, got {name!r}" in said
    assert "\n" not in said


@pytest.mark.parametrize("digest", ["../" * 12 + "etc/hostname", "//etc/hostname", "../x.dir"])
def test_a_digest_that_is_a_path_is_refused(workspace: Path, tmp_path: Path, digest: str):
    (tmp_path / "out").mkdir()
    point_to(workspace, {"policy": {"digest": digest}})
    assert f"{digest!r}: must be an md5 of DVC" in refusal(tmp_path / "out" / "loaded")
    # Nor may a listing give such a hash to one of its files.
    listed = [{"md5": digest, "relpath": "state.json"}]
    point_to(
        workspace, {"policy": {"digest": store(workspace, json.dumps(listed).encode(), ".dir")}}
    )
    assert f"{digest!r}: must be an md5 of DVC" in refusal(tmp_path / "out" / "loaded")


@pytest.mark.parametrize("pointer", [[], {"policy": "x"}, {"policy": {"digest": "0" * 32}}])
def test_a_pointer_that_points_nowhere_is_one_line(
    workspace: Path, tmp_path: Path, pointer: object
):
    (tmp_path / "out").mkdir()
    point_to(workspace, pointer)
    assert "\n" not in refusal(tmp_path / "out" / "loaded")


@pytest.mark.parametrize("name", ["modeling.py", "nested/weights.pt"])
def test_content_that_may_run_code_is_not_loaded(workspace: Path, tmp_path: Path, name: str):
    (tmp_path / "out").mkdir()
    listed = [{"md5": store(workspace, b"raise SystemExit"), "relpath": name}]
    digest = store(workspace, json.dumps(listed).encode(), ".dir")
    point_to(workspace, {"policy": {"digest": digest}})
    assert "may hold a pickle or code, which is executed on load" in refusal(
        tmp_path / "out" / "loaded"
    )
