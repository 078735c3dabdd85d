"""What the Prometheus operator reads, against the pods."""

from tests.deploy import nats_chart
from tests.deploy.kubernetes import KUBERNETES, container_of, of_kind
from tests.deploy.kustomize import Resource


def test_prometheus_reads_every_status_server(everything: list[Resource]) -> None:
    [monitor] = of_kind(everything, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = of_kind(everything, "Service")
    [service] = [s for s in services if wanted <= s["metadata"].get("labels", {}).items()]
    assert {(one["port"], one["path"]) for one in monitor["spec"]["endpoints"]} == {
        ("status", "/metrics"),
        ("status", "/metrics/vllm"),
    }
    assert {port["name"] for port in service["spec"]["ports"]} == {"status"}


def test_prometheus_reads_nats_and_etcd(everything: list[Resource]) -> None:
    values = nats_chart.read_values(KUBERNETES / "nats-values.yaml")
    assert values["promExporter"] == {"enabled": True}
    [etcd] = of_kind(everything, "StatefulSet")
    pods = {
        "nats": (nats_chart.LABELS, set(nats_chart.PORTS)),
        "etcd": (
            etcd["spec"]["template"]["metadata"]["labels"],
            {port["name"] for port in container_of(etcd)["ports"]},
        ),
    }
    found = of_kind(everything, "PodMonitor")
    assert {monitor["metadata"]["name"] for monitor in found} == set(pods)
    for monitor in found:
        labels, ports = pods[monitor["metadata"]["name"]]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= ports
