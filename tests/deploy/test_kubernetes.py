"""The Kubernetes manifests: against the API's schemas, the command line, and each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dynamo_lite import __version__
from tests.deploy.command_lines import DEPLOY, Served, served, variables
from tests.deploy.kustomize import Resource, build

KUBERNETES = DEPLOY / "kubernetes"
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


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    """An overlay of a user's own, with the component."""
    return build(with_monitoring(tmp_path_factory.mktemp("monitored")))


def with_monitoring(folder: Path) -> Path:
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    mine = folder / "kubernetes" / "overlays" / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../cpu]\ncomponents: [../../components/monitoring]\n"
    )
    return mine


def of_kind(resources: list[Resource], kind: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] == kind]


def pod_of(deployment: Resource) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


def container_of(deployment: Resource) -> dict[str, Any]:
    [container] = pod_of(deployment)["containers"]
    return container


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
    assert {r["kind"] for r in resources} >= {"Deployment", "Service", "Secret", "NetworkPolicy"}
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_schemas_are_strict(resources: list[Resource]) -> None:
    [service] = of_kind(resources, "Service")
    wrong = {**service, "spec": {**service["spec"], "port": 80}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_same(
    overlay: Path, resources: list[Resource], tmp_path: Path
) -> None:
    mine = with_monitoring(tmp_path)
    for folder, expected in ((overlay, resources), (mine, build(mine))):
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
        assert command.options["secret_file"] == Path(mounts["secret"]) / "secret"
        ports = {p["name"]: p["containerPort"] for p in container_of(deployment)["ports"]}
        assert ports.pop("status") == command.service.status_port
        assert ports == ({"http": 8000} if command.service.options.get("port") else {})
    assert started == {
        "frontend": "Frontend",
        "decode": "VllmWorker",
        "prefill": "PrefillWorker",
    }


def test_the_environment_is_what_the_command_reads(resources: list[Resource]) -> None:
    [secret] = of_kind(resources, "Secret")
    assert set(secret["stringData"]) == variables()
    for deployment in of_kind(resources, "Deployment"):
        container = container_of(deployment)
        assert {one["name"] for one in container["env"]} == FOREIGN_VARIABLES
        assert container["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]


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


def test_probes_ask_the_status_server(resources: list[Resource]) -> None:
    paths = {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    for deployment in of_kind(resources, "Deployment"):
        for probe, path in paths.items():
            assert container_of(deployment)[probe]["httpGet"] == {"path": path, "port": "status"}


def test_containers_can_do_no_more_than_they_must(resources: list[Resource]) -> None:
    for deployment in of_kind(resources, "Deployment"):
        pod, container = pod_of(deployment), container_of(deployment)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert {"/tmp", "/var/lib/dynamo-lite"} <= set(mounts.values())


def test_images_and_references_exist(resources: list[Resource]) -> None:
    names = {(resource["kind"], resource["metadata"]["name"]) for resource in resources}
    assert len(names) == len(resources)
    for deployment in of_kind(resources, "Deployment"):
        image = container_of(deployment)["image"]
        assert image in (f"dynamo-lite:{__version__}-cpu", f"dynamo-lite:{__version__}-cuda")
        for volume in pod_of(deployment)["volumes"]:
            if (source := volume.get("configMap")) is not None:
                assert ("ConfigMap", source["name"]) in names
            if (source := volume.get("persistentVolumeClaim")) is not None:
                assert ("PersistentVolumeClaim", source["claimName"]) in names


def test_selectors_choose_the_pods_that_are_meant(monitored: list[Resource]) -> None:
    pods = {
        deployment["metadata"]["name"]: deployment["spec"]["template"]["metadata"]["labels"]
        for deployment in of_kind(monitored, "Deployment")
    }
    services = {s["metadata"]["name"]: s for s in of_kind(monitored, "Service")}

    def chosen(selector: dict[str, str]) -> set[str]:
        assert selector
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    assert chosen(services["dynamo-lite"]["spec"]["selector"]) == {"frontend"}
    assert chosen(services["dynamo-lite-status"]["spec"]["selector"]) == set(pods)
    budgets = of_kind(monitored, "PodDisruptionBudget")
    assert {b["metadata"]["name"] for b in budgets} == set(pods)
    for one in [*budgets, *of_kind(monitored, "Deployment")]:
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {one["metadata"]["name"]}
    policies = {
        policy["metadata"]["name"]: chosen(policy["spec"]["podSelector"]["matchLabels"])
        for policy in of_kind(monitored, "NetworkPolicy")
    }
    assert policies == {
        "dynamo-lite-inside": set(pods),
        "dynamo-lite-http": {"frontend"},
        "dynamo-lite-status": set(pods),
    }


def test_prometheus_reads_every_status_server(monitored: list[Resource]) -> None:
    """Its resource is of the Prometheus operator, of which no schema is a dependency here."""
    [monitor] = of_kind(monitored, "ServiceMonitor")
    services = of_kind(monitored, "Service")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [service] = [s for s in services if wanted <= s["metadata"]["labels"].items()]
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {(one["port"], one["path"]) for one in monitor["spec"]["endpoints"]} == {
        ("status", "/metrics"),
        ("status", "/metrics/vllm"),
    }
    assert ports == {"status"}


def test_gpus_and_rdma_devices_are_limits_of_the_workers() -> None:
    for name, wanted in (
        ("cpu", set[str]()),
        ("gpu", {"nvidia.com/gpu"}),
        ("gpu-rdma", {"nvidia.com/gpu", "rdma/hca_shared_devices_a"}),
    ):
        for deployment in of_kind(build(KUBERNETES / "overlays" / name), "Deployment"):
            limits = set(container_of(deployment)["resources"]["limits"]) - {"memory"}
            assert limits == (set() if deployment["metadata"]["name"] == "frontend" else wanted)


def test_the_reader_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\nnamePrefix: x-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        build(tmp_path)
