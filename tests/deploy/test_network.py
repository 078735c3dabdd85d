"""Who may connect to whom: the NetworkPolicies of the graph, of NATS and of etcd together."""

import pytest

from tests.deploy import nats_chart
from tests.deploy.kubernetes import container_of, of_kind
from tests.deploy.kustomize import Resource
from tests.deploy.policies import Pod, reachable

ANY = None


@pytest.fixture(scope="module")
def pods(everything: list[Resource]) -> dict[str, Pod]:
    found = {
        workload["metadata"]["name"]: Pod(
            workload["spec"]["template"]["metadata"]["labels"],
            {
                port["name"]: port["containerPort"]
                for port in container_of(workload).get("ports", ())
            },
        )
        for workload in everything
        if workload["kind"] in ("Deployment", "StatefulSet", "Job")
    }
    return found | {
        "nats": Pod(nats_chart.LABELS, nats_chart.PORTS),
        "stranger": Pod({"app": "other"}, {}),
        # Labels are what a pod's owner writes; in another namespace they mean nothing.
        "impostor": Pod(found["frontend"].labels, {}, namespace="other"),
        "prometheus": Pod({}, {}, namespace="monitoring"),
    }


#: Rows: who connects. What is not listed may connect to nothing but the Frontends' HTTP port.
ALLOWED = {
    ("frontend", "decode"): ANY,
    ("prefill", "decode"): ANY,
    ("decode", "prefill"): ANY,
    ("operator", "frontend"): {"http", "status"},
    ("operator", "decode"): {"status"},
    ("operator", "prefill"): {"status"},
    ("prometheus", "frontend"): {"http", "status"},
    ("prometheus", "decode"): {"status"},
    ("prometheus", "prefill"): {"status"},
    ("prometheus", "nats"): {"prom-metrics"},
    ("prometheus", "etcd"): {"metrics"},
    ("nats", "nats"): {"cluster"},
    ("etcd", "etcd"): {"peer"},
    **{(name, "nats"): {"nats"} for name in ("frontend", "decode", "prefill", "operator")},
    **{(name, "etcd"): {"client"} for name in ("frontend", "decode", "prefill", "operator")},
    ("etcd-users", "etcd"): {"client"},
}


def test_no_pod_reaches_more_than_it_must(pods: dict[str, Pod], everything: list[Resource]) -> None:
    policies = of_kind(everything, "NetworkPolicy")
    seen = {
        (source, target): reachable(pods[source], pods[target], policies)
        for source in pods
        for target in ("frontend", "decode", "prefill", "operator", "nats", "etcd")
    }
    expected = {
        (source, target): ALLOWED.get((source, target), {"http"} if target == "frontend" else set())
        for source, target in seen
    }
    assert seen == expected
