"""The files of infra/ as what they describe: services, manifests, pods, environments."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
DOCKERFILES = sorted((INFRA / "docker").glob("*ockerfile"))
COMPOSE = sorted(INFRA.glob("compose*.yaml"))
MANIFESTS = sorted((INFRA / "kubernetes").glob("*.yaml"))
WORK_POOL = json.loads((INFRA / "kubernetes" / "work-pool.json").read_text())
SERVICES: dict[str, dict[str, Any]] = {
    name: service
    for file in ("compose.yaml", "compose.rewards.yaml")
    for name, service in yaml.safe_load((INFRA / file).read_text())["services"].items()
    if "image" in service  # not an override of one that another file describes
}
LOCK = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().split())


def resources() -> list[dict[str, Any]]:
    """Returns what the manifests describe, Kustomize's own list left out."""
    every = [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]
    return [each for each in every if each["kind"] != "Kustomization"]


def flow_run_job() -> dict[str, Any]:
    """Returns the Job that Prefect's worker makes of the work pool's defaults."""
    properties = WORK_POOL["variables"]["properties"]
    values = {name: each.get("default", "a command") for name, each in properties.items()}
    job: dict[str, Any] = _filled(WORK_POOL["job_configuration"]["job_manifest"], values)
    # As in Prefect's own template, which the worker compares it with; Kubernetes ignores them.
    for key in ("parallelism", "completions"):
        del job["spec"]["template"]["spec"][key]
    job["spec"]["template"]["spec"]["containers"][0]["args"] = values["command"].split()
    return job


def _filled(template: Any, values: dict[str, Any]) -> Any:
    if isinstance(template, dict):
        return {key: _filled(each, values) for key, each in template.items()}
    if isinstance(template, list):
        return [_filled(each, values) for each in template]
    if not isinstance(template, str):
        return template
    whole = re.fullmatch(r"{{ (\w+) }}", template)
    if whole:
        return values[whole[1]]
    return re.sub(r"{{ (\w+) }}", lambda found: str(values[found[1]]), template)


def pods() -> dict[str, dict[str, Any]]:
    """Returns the specification of every pod by the name of what makes it."""
    makers = {
        each["metadata"].get("name") or each["metadata"]["generateName"]: each
        for each in [*resources(), flow_run_job()]
        if "template" in each.get("spec", {})
    }
    return {name: maker["spec"]["template"]["spec"] for name, maker in makers.items()}


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods().items():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield name, container


def images() -> Iterator[str]:
    """Yields every image that a file of infra/ names."""
    for path in DOCKERFILES:
        yield from re.findall(r"^FROM (\S+)", path.read_text(), flags=re.M)
    for path in COMPOSE:
        services = yaml.safe_load(path.read_text())["services"].values()
        yield from (each["image"] for each in services if "image" in each)
    for _, container in containers():
        yield container["image"]


def example_names() -> dict[str, str]:
    """Returns the names and values of example.env."""
    lines = (INFRA / "example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))
