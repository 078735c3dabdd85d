"""Which pods may connect to which, by NetworkPolicies."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.deploy.kustomize import Resource, only

#: The label that Kubernetes puts on every namespace.
_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Pod:
    labels: Mapping[str, str]
    #: By name.
    ports: Mapping[str, int]
    namespace: str = "graph"


def reachable(source: Pod, target: Pod, policies: list[Resource]) -> set[str] | None:
    """Names of the target's ports that the source may connect to; None if it may connect to any
    port, also to those that have no name. The policies are in the target's namespace."""
    applied = [p for p in policies if _matches(p["spec"]["podSelector"], target.labels)]
    if not applied:
        return None
    found = set[str]()
    for policy in applied:
        only(policy["spec"], {"podSelector", "policyTypes", "ingress"})
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            only(rule, {"from", "ports"})
            if not any(_admits(peer, source, target) for peer in rule.get("from", [{}])):
                continue
            if "ports" not in rule:
                return None
            named = {port["port"] for port in rule["ports"]}
            found |= named & target.ports.keys()
    return found


def _admits(peer: Resource, source: Pod, target: Pod) -> bool:
    only(peer, {"podSelector", "namespaceSelector"})
    if not peer:
        return True
    if (selector := peer.get("namespaceSelector")) is None:
        return source.namespace == target.namespace and _matches(peer["podSelector"], source.labels)
    return _matches(selector, {_NAMESPACE: source.namespace}) and (
        "podSelector" not in peer or _matches(peer["podSelector"], source.labels)
    )


def _matches(selector: Resource, labels: Mapping[str, str]) -> bool:
    only(selector, {"matchLabels"})
    return selector.get("matchLabels", {}).items() <= labels.items()
