"""Deployments as the place where workers are started and removed.

A number of replicas is set through the `scale` subresource with the resource version on which it
was decided, so a change by another client meanwhile is a conflict and not lost. Kubernetes chooses
which pod of a Deployment ends, so the worker to remove is marked with `pod-deletion-cost`. SIGTERM
drains it, within the pod's `terminationGracePeriodSeconds`.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from dynamo_lite.planner.config import KubernetesOptions
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.planner import RoleCounts
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.kubernetes import KubernetesApi

#: Pods with a lower cost are ended first.
_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_LOWEST_COST = -(1 << 31)
_SUBJECT = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


class KubernetesConnector:
    """Implements Connector."""

    def __init__(self, api: KubernetesApi, options: KubernetesOptions):
        self._api = api
        self._workloads, self._devices = options.workloads, options.devices
        #: The resource version of each that `counts` saw last.
        self._versions: dict[str, str] = {}
        #: Its pods.
        self._pods_of: dict[str, set[str]] = {}
        #: The lowest cost of its pods: an order that failed leaves the mark of another victim.
        self._lowest: dict[str, int] = {}

    async def counts(self) -> Mapping[str, RoleCounts]:
        return {name: await self._counts(name) for name in self._workloads}

    async def change(
        self, component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        """Sets the replicas, if nothing has changed since the last `counts`."""
        if victim is not None:
            await self._mark(victim.host, max(self._lowest[component] - 1, _LOWEST_COST))
        change: Mapping[str, Any] = {
            "metadata": {"resourceVersion": self._versions[component]},
            "spec": {"replicas": count},
        }
        await self._api.patch(f"{self._path(component)}/scale", change)

    def owns(self, worker: EndpointRecord) -> bool:
        """Whether it is a pod that the last `counts` saw."""
        return worker.host in self._pods_of.get(worker.component, ())

    async def _mark(self, host: str, cost: int) -> None:
        """Marks a pod as the one that Kubernetes ends first."""
        if not re.fullmatch(_SUBJECT, host):
            raise ProtocolError(f"{host!r} is not the name of a pod")
        change = {"metadata": {"annotations": {_DELETION_COST: str(cost)}}}
        await self._api.patch(f"{self._pods}/{host}", change)

    async def _counts(self, component: str) -> RoleCounts:
        path = self._path(component)
        found = await self._api.get(path)
        try:
            spec, status = found["spec"], found.get("status", {})
            self._versions[component] = str(found["metadata"]["resourceVersion"])
            wanted = int(spec.get("replicas", 1))
            ready = min(int(status.get("readyReplicas", 0)), wanted)
            labels = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
            listed = await self._api.get(f"{self._pods}?labelSelector={quote(labels)}")
            pods = [pod["metadata"] for pod in listed["items"]]
            # A Deployment does not count its pods that end; they have their devices until then.
            ending = sum("deletionTimestamp" in one for one in pods)
            self._pods_of[component] = {str(one["name"]) for one in pods}
            costs = [int(one.get("annotations", {}).get(_DELETION_COST, 0)) for one in pods]
            self._lowest[component] = min(costs, default=0)
            return RoleCounts(
                starting=wanted - ready,
                ready=ready,
                draining=max(int(status.get("replicas", 0)) - wanted, 0) + ending,
                devices_each=self._devices[component],
                # The scheduler of Kubernetes knows; a pod without a device stays pending.
                devices_free=100_000,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"Kubernetes: {path}: not the expected answer: {exc!r}") from exc

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._api.namespace}/pods"

    def _path(self, component: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._api.namespace}/{self._workloads[component]}"
