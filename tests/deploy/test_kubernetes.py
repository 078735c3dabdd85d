"""The Kubernetes manifests: against the API's schemas, the command line, and each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from dynamo_lite.runtime.address import has_credentials
from tests.deploy.command_lines import Served, served, variables
from tests.deploy.containers import make_secrets
from tests.deploy.kubernetes import (
    KUBERNETES,
    container_of,
    of_kind,
    pod_of,
    secret_of,
    with_components,
)
from tests.deploy.kustomize import Resource, build

OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
#: The oldest version that the manifests are written for, and the newest that is known.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
#: Variables of vLLM and of the hub, and those that Kubernetes fills in.
FOREIGN_VARIABLES = {"HF_HOME", "POD_IP"}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Path:
    return KUBERNETES / "overlays" / request.param


@pytest.fixture(scope="module")
def resources(overlay: Path) -> list[Resource]:
    return build(overlay)


def command_of(deployment: Resource, overlay: Path) -> Served:
    """Its arguments, with the variables that Kubernetes puts in."""
    arguments = [a.replace("$(POD_IP)", "10.0.0.9") for a in container_of(deployment)["args"]]
    assert not [a for a in arguments if "$" in a]
    graph = overlay / "graph.yaml"
    if not graph.exists():
        graph = overlay.parent / "gpu" / "graph.yaml"
    return served(arguments, {"/etc/dynamo-lite/graph.yaml": graph})


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_what_the_api_server_takes(
    resources: list[Resource], version: str
) -> None:
    assert {r["kind"] for r in resources} >= {"Deployment", "Service", "NetworkPolicy"}
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_planes_and_components_are_what_the_api_server_takes(
    planes: list[Resource], everything: list[Resource], version: str
) -> None:
    assert {r["kind"] for r in planes} == {
        *("Service", "PodDisruptionBudget", "StatefulSet", "Job", "NetworkPolicy")
    }
    for resource in everything:
        # The schemas of the Prometheus operator's are not in there.
        if not resource["apiVersion"].startswith("monitoring."):
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_same(
    overlay: Path, resources: list[Resource], tmp_path: Path
) -> None:
    mine = with_components(tmp_path)
    planes = KUBERNETES / "planes"
    for folder, expected in ((overlay, resources), (mine, build(mine)), (planes, build(planes))):
        built = subprocess.run(
            ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
        )
        assert built.returncode == 0, built.stderr
        text = re.sub(r"(name: dynamo-lite-graph)-[a-z0-9]{10}\b", r"\1", built.stdout)
        theirs = [one for one in yaml.safe_load_all(text)]
        assert sorted(map(canonical, theirs)) == sorted(map(canonical, expected))


def canonical(resource: Resource) -> str:
    return json.dumps(resource, sort_keys=True)


def test_every_container_starts_its_service(overlay: Path, resources: list[Resource]) -> None:
    started = {}
    for deployment in of_kind(resources, "Deployment"):
        command = command_of(deployment, overlay)
        started[deployment["metadata"]["name"]] = command.options["service_name"]
        assert command.service.workers == 1
        assert command.config.shared.bind_host == "10.0.0.9"
        assert command.options["log_to"] == "stderr"
        mounts = {m["name"]: m["mountPath"] for m in container_of(deployment)["volumeMounts"]}
        assert command.config.shared.certificates == mounts["access"]
        ports = {p["name"]: p["containerPort"] for p in container_of(deployment)["ports"]}
        assert ports.pop("status") == command.service.status_port
        assert ports == ({"http": 8000} if command.service.options.get("port") else {})
    assert started == {"frontend": "Frontend", "decode": "VllmWorker", "prefill": "PrefillWorker"}


def test_the_environment_is_what_the_command_reads(
    overlay: Path, resources: list[Resource]
) -> None:
    for deployment in of_kind(resources, "Deployment"):
        container = container_of(deployment)
        given = {one["name"]: one.get("value", "") for one in container["env"]}
        assert set(given) == FOREIGN_VARIABLES | variables()
        component = command_of(deployment, overlay).options["service_name"]
        assert given["DYNAMO_LITE_NATS_URL"].endswith(f"&inbox=_INBOX_dynamo-{component}")
        assert not any(has_credentials(given[name]) for name in variables())
        # The HTTP key and the hub's token, where they are needed.
        optional = {"name": "dynamo-lite", "optional": True}
        assert container["envFrom"] == [{"secretRef": optional}]


def test_the_grace_period_is_longer_than_the_longest_drain(
    overlay: Path, resources: list[Resource]
) -> None:
    for deployment in of_kind(resources, "Deployment"):
        hook = container_of(deployment).get("lifecycle", {}).get("preStop")
        pre_stop_s = 0.0
        if hook is not None:
            program, seconds = hook["exec"]["command"]
            assert program == "sleep"
            pre_stop_s = float(seconds)
        command = command_of(deployment, overlay)
        # Only clients that are not ours still connect after SIGTERM.
        assert (pre_stop_s > 0) == (command.service.service.name == "Frontend")
        needed_s = pre_stop_s + command.longest_stop_s
        assert needed_s <= pod_of(deployment)["terminationGracePeriodSeconds"] <= needed_s + 30


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The files of each Secret that the page makes."""
    folder = make_secrets(tmp_path_factory.mktemp("secrets"))
    return {
        path.name.lower(): {file.name for file in path.iterdir()}
        for path in folder.iterdir()
        if path.is_dir()
    }


def test_every_secret_is_one_that_the_page_makes(
    resources: list[Resource], everything: list[Resource], secrets: dict[str, set[str]]
) -> None:
    """And every file that a command line, a URL or an option names is in it."""
    for workload in [*resources, *everything]:
        if workload["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        container, files = container_of(workload), set[str]()
        for mount in container["volumeMounts"]:
            for volume in pod_of(workload)["volumes"]:
                if volume["name"] != mount["name"]:
                    continue
                if secret := secret_of(volume):
                    assert volume["secret"]["defaultMode"] == 0o440
                    files |= {f"{mount['mountPath']}/{name}" for name in secrets[secret]}
                    files.add(mount["mountPath"])
        words = [
            *container.get("args", ()),
            *(e.get("value", "") for e in container.get("env", ())),
        ]
        named = {
            path
            for word in words
            for path in re.findall(r"(?<==)/etc/[\w./-]+", word)
            if not path.endswith("/graph.yaml")
        }
        assert named and named <= files


def test_selectors_choose_the_pods_that_are_meant(
    resources: list[Resource], everything: list[Resource]
) -> None:
    pods = {
        workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"]
        for workload in everything
        if workload["kind"] in ("Deployment", "StatefulSet", "Job")
    }
    graph = {deployment["metadata"]["name"] for deployment in of_kind(resources, "Deployment")}
    assert set(pods) == {*graph, "operator", "etcd", "etcd-users"}
    services = {s["metadata"]["name"]: s for s in of_kind(everything, "Service")}

    def chosen(selector: dict[str, str]) -> set[str]:
        assert selector
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    assert chosen(services["dynamo-lite"]["spec"]["selector"]) == {"frontend"}
    assert chosen(services["etcd"]["spec"]["selector"]) == {"etcd"}
    # Of those only the graph's have a port called status.
    assert chosen(services["dynamo-lite-status"]["spec"]["selector"]) == {*graph, "operator"}
    budgets = of_kind(everything, "PodDisruptionBudget")
    assert {b["metadata"]["name"] for b in budgets} == {*graph, "etcd"}
    for one in [*budgets, *of_kind(everything, "Deployment"), *of_kind(everything, "StatefulSet")]:
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {one["metadata"]["name"]}
