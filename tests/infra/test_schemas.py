"""What no engine is needed for: schemas of Kubernetes and of compose files, a linter's rules."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from tests.infra.files import COMPOSE, DOCKERFILES, WORK_POOL, flow_run_job, resources

KUBERNETES = "1.34"
HADOLINT = Path(sys.executable).with_name("hadolint")


def title(resource: dict[str, Any]) -> str:
    metadata = resource["metadata"]
    return f"{resource['kind']}-{metadata.get('name') or metadata['generateName']}"


@pytest.fixture(scope="module")
def compose_schema() -> Draft202012Validator:
    path = files("check_jsonschema.builtin_schemas.vendor") / "compose-spec.json"
    return Draft202012Validator(json.loads(path.read_text()))


@pytest.mark.parametrize("resource", [*resources(), flow_run_job()], ids=title)
def test_a_manifest_is_what_kubernetes_takes(resource: dict[str, Any]):
    kubernetes_validate.validate(resource, KUBERNETES, strict=True)


def test_a_misspelled_key_of_a_manifest_is_refused():
    job = flow_run_job()
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="'resource' was unexpected"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_is_what_its_specification_takes(
    compose_schema: Draft202012Validator, path: Path
):
    compose_schema.validate(yaml.safe_load(path.read_text()))


def test_a_misspelled_key_of_a_compose_file_is_refused(compose_schema: Draft202012Validator):
    with pytest.raises(ValidationError, match="'healtcheck' was unexpected"):
        compose_schema.validate({"services": {"s3": {"image": "x:1.0", "healtcheck": {}}}})


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing_in_a_dockerfile(path: Path):
    result = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_linter_finds_an_image_without_a_version(tmp_path: Path):
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python\n")
    result = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True)
    assert "DL3006" in result.stdout


def test_every_variable_of_the_work_pool_has_an_effect():
    text = json.dumps(WORK_POOL["job_configuration"])
    for name in WORK_POOL["variables"]["properties"]:
        assert f"{{{{ {name} }}}}" in text, name
