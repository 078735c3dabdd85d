"""What the Prometheus operator reads, against the pods."""

import pytest

from tests.deploy import nats_chart
from tests.deploy.kubernetes import KUBERNETES, container_of, of_kind, with_components
from tests.deploy.kustomize import Resource, build


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    mine = with_components(tmp_path_factory.mktemp("complete"))
    return [*build(mine), *build(KUBERNETES / "planes")]


def test_prometheus_reads_every_status_server(resources: list[Resource]) -> None:
    [monitor] = of_kind(resources, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = of_kind(resources, "Service")
    [service] = [s for s in services if wanted <= s["metadata"].get("labels", {}).items()]
    assert {(one["port"], one["path"]) for one in monitor["spec"]["endpoints"]} == {
        ("status", "/metrics"),
        ("status", "/metrics/vllm"),
    }
    assert {port["name"] for port in service["spec"]["ports"]} == {"status"}


def test_prometheus_reads_nats_and_etcd(resources: list[Resource]) -> None:
    values = nats_chart.read_values(KUBERNETES / "nats-values.yaml")
    assert values["promExporter"] == {"enabled": True}
    [etcd] = of_kind(resources, "StatefulSet")
    pods = {
        "nats": (nats_chart.LABELS, set(nats_chart.PORTS)),
        "etcd": (
            etcd["spec"]["template"]["metadata"]["labels"],
            {port["name"] for port in container_of(etcd)["ports"]},
        ),
    }
    found = of_kind(resources, "PodMonitor")
    assert {monitor["metadata"]["name"] for monitor in found} == set(pods)
    for monitor in found:
        labels, ports = pods[monitor["metadata"]["name"]]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= ports
