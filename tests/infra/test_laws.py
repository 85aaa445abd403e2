"""No secret, no root, no version left open, nothing open beyond this machine."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.infra.files import (
    COMPOSE,
    DOCKERFILES,
    INFRA,
    LOCK,
    MANIFESTS,
    ROOT,
    SERVICES,
    WORK_POOL,
    containers,
    example_names,
    images,
    pods,
    resources,
)

SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|KEY|CREDENTIAL")
REQUIRED = re.compile(r"\$\{(\w+):\?[^}]+\}")  # compose stops where the environment lacks it
# Where a secret lies in the cluster, for the worker to refer to.
LOCATIONS = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET_"
WRITTEN_SECRETS = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN|gh[pousr]_\w{20}|hf_\w{20}|://[^/\s:@]+:[^/\s:@]+@"
)
VERSION = re.compile(r"\d+\.\d+(\.\d+)?(-[\w.-]+)?")


@pytest.mark.parametrize("name", SERVICES)
def test_a_secret_of_a_service_comes_from_the_environment(name: str):
    for key, value in SERVICES[name].get("environment", {}).items():
        if SECRET.search(key):
            assert REQUIRED.fullmatch(value), key


def test_a_secret_of_a_container_is_a_reference():
    for name, container in containers():
        for variable in container.get("env", []):
            if SECRET.search(variable["name"]) and not variable["name"].startswith(LOCATIONS):
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["name"] == "grpo", name
                assert reference["key"] in example_names(), name


def test_only_mlflow_and_what_makes_accounts_have_the_administrators_password():
    """A worker with it could move the aliases of models."""
    services = {name for name, each in SERVICES.items() if "MLFLOW_ADMIN_PASSWORD" in str(each)}
    assert services == {"mlflow", "accounts"}
    made = {name for name, each in containers() if "MLFLOW_ADMIN_PASSWORD" in str(each)}
    assert made == {"mlflow", "accounts-"}


def test_no_file_holds_a_secret():
    paths = [path for path in INFRA.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(paths) > 15
    for path in [*paths, ROOT / ".dockerignore"]:
        assert not WRITTEN_SECRETS.search(path.read_text()), path
    assert not [each for each in resources() if each["kind"] == "Secret"]


def test_the_example_names_what_compose_needs_and_gives_no_value():
    needed = {name for path in COMPOSE for name in REQUIRED.findall(path.read_text())}
    assert example_names() == dict.fromkeys(needed, "")


def test_the_filled_example_enters_neither_git_nor_an_image():
    assert "/infra/.env" in (ROOT / ".gitignore").read_text().splitlines()
    first, *rest = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert first == "*"
    assert {"!infra", "!infra/", "!.git", "!.dvc"}.isdisjoint(rest)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_user_who_is_not_root(path: Path):
    last = re.findall(r"^USER (\S+)$", path.read_text(), flags=re.M)[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_root_and_no_privilege(name: str):
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"privileged", "cap_add", "network_mode", "pid"}.isdisjoint(service)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_bounded(name: str):
    service = SERVICES[name]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert all("size=" in each for each in service["tmpfs"])


def test_what_runs_stages_has_shared_memory_and_caches_on_a_disk():
    """NCCL and vLLM need more than 64 MB, and /tmp of a container is memory."""
    assert SERVICES["worker"]["shm_size"] == "8g"
    assert any("exec" in each for each in SERVICES["worker"]["tmpfs"])  # for torch.compile
    job = WORK_POOL["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    for pod in (pods()["train-"], job):
        (container,) = pod["containers"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        shared = next(each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
        assert shared == {"medium": "Memory", "sizeLimit": "8Gi"}
        found = {each["name"]: each.get("value", "") for each in container["env"]}
        assert all(found[name].startswith("/workspace/") for name in ("XDG_CACHE_HOME", "HF_HOME"))
    caches = SERVICES["worker"]["environment"]
    assert all(caches[name].startswith("/workspace/") for name in ("XDG_CACHE_HOME", "HF_HOME"))


@pytest.mark.parametrize("name", pods())
def test_a_pod_is_restricted_and_its_containers_are_limited(name: str):
    pod = pods()[name]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert not security["allowPrivilegeEscalation"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][bound])


def test_only_the_worker_may_speak_to_kubernetes():
    allowed = [name for name, pod in pods().items() if pod.get("automountServiceAccountToken", 1)]
    assert allowed == ["worker"]


def test_ports_are_open_to_this_machine_alone():
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    for each in resources():
        if each["kind"] == "Service":
            assert each["spec"]["type"] == "ClusterIP"


def test_every_image_has_a_version():
    for image in images():
        assert VERSION.fullmatch(image.rsplit(":", 1)[1]), image


def test_versions_are_those_of_the_lock():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert version
    tags = {f"grpo:{version[1]}-cpu", f"grpo:{version[1]}-cuda"}
    assert {each for each in images() if each.startswith("grpo:")} == tags
    (prefect,) = {each for each in images() if each.startswith("prefecthq/prefect:")}
    assert prefect.split(":")[1].startswith(f"{LOCK['prefect']}-python3.11-")
    for path in DOCKERFILES:  # what is installed, `make setup` installs from the lock
        assert not re.search(r"pip3? install|==", path.read_text()), path
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"\b(\w+)==([\d.]+)", makefile)[0] == ("torch", LOCK["torch"])
    assert "-r requirements.lock" in makefile


def test_kustomize_applies_all_but_the_jobs_that_run_at_once():
    (listed,) = (
        yaml.safe_load(path.read_text())["resources"]
        for path in MANIFESTS
        if path.name == "kustomization.yaml"
    )
    jobs = {"accounts.yaml", "clone.yaml", "train.yaml"}
    assert {*listed, *jobs, "kustomization.yaml"} == {path.name for path in MANIFESTS}


def test_mlflows_server_unpickles_nothing():
    setting = ("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    assert setting in SERVICES["mlflow"]["environment"].items()
    (variables,) = [each["env"] for name, each in containers() if name == "mlflow"]
    assert setting in [(each["name"], each.get("value")) for each in variables]


def test_every_setting_of_mlflow_is_one_that_it_reads():
    package = find_spec("mlflow")
    assert package is not None
    assert package.origin
    folder = Path(package.origin).parent
    known = (
        "".join(
            (folder / each).read_text() for each in ("environment_variables.py", "cli/__init__.py")
        )
        + (folder / "utils" / "cli_args.py").read_text()
    )
    text = "".join(path.read_text() for path in [*COMPOSE, *MANIFESTS])
    names = set(re.findall(r"\bMLFLOW_(?!ADMIN|DATABASE|SECRET|WORKER)\w+", text))
    assert len(names) > 5
    for name in names:
        assert f'"{name}"' in known, name
