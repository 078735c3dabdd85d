"""What the Prometheus operator reads: against the schemas of its resources, and the pods."""

import copy
from typing import Any

import jsonschema
import pytest

from tests.deploy import nats_chart
from tests.deploy.kubernetes import KUBERNETES, container_of, of_kind, with_components
from tests.deploy.kustomize import Resource, build

#: Of the operator's CustomResourceDefinitions (0.93), the fields that are used here, with their
#: types and patterns. A field that they do not list is refused.
_DURATION = (
    "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
)
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _fields(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


_ENDPOINTS = {
    "type": "array",
    "items": _fields(
        port={"type": "string"},
        path={"type": "string"},
        interval={"type": "string", "pattern": _DURATION},
    ),
}
_SELECTOR = _fields(matchLabels=_TEXTS)


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind={"const": kind},
        metadata=_fields(("name",), name={"type": "string"}, labels=_TEXTS),
        spec=spec,
    )


SCHEMAS = {
    "ServiceMonitor": _resource(
        "ServiceMonitor",
        _fields(("endpoints", "selector"), endpoints=_ENDPOINTS, selector=_SELECTOR),
    ),
    "PodMonitor": _resource(
        "PodMonitor", _fields(("selector",), podMetricsEndpoints=_ENDPOINTS, selector=_SELECTOR)
    ),
}


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    mine = with_components(tmp_path_factory.mktemp("complete"))
    return [*build(mine), *build(KUBERNETES / "planes")]


def monitors(resources: list[Resource]) -> list[Resource]:
    found = [one for one in resources if one["apiVersion"].startswith("monitoring.coreos.com")]
    assert {one["kind"] for one in found} == set(SCHEMAS)
    return found


def test_the_operator_takes_them(resources: list[Resource]) -> None:
    for monitor in monitors(resources):
        jsonschema.validate(monitor, SCHEMAS[monitor["kind"]])


def test_the_schemas_are_strict(resources: list[Resource]) -> None:
    for monitor in monitors(resources):
        listed = "endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
        for key, value in (("intervall", "15s"), ("interval", "15 s"), ("port", 9000)):
            wrong = copy.deepcopy(monitor)
            wrong["spec"][listed][0][key] = value
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, SCHEMAS[monitor["kind"]])


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
