"""The Frontend's dispatcher: it knows the decode workers, and hands each request to one of them."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.admission import Admission, limits
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded
from dynamo_lite.routing.kv_routing import KvPicker
from dynamo_lite.routing.pickers import Picker, Random, RoundRobin
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.component_options import ComponentOptions
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.frontend.rotation import rotate
from dynamo_lite.serve.services.frontend.router_client import RemoteRouter
from dynamo_lite.serve.services.kv_picker import open_kv_picker
from dynamo_lite.serve.services.metrics import RequestMetrics

if TYPE_CHECKING:
    from dynamo_lite.vllm.frontend.intake import Intake


_SEE_LOGS = "see `dynamo-lite ps` and their logs"


@dataclass(frozen=True)
class WorkerCheck:
    """At most one of the two texts is not empty."""

    #: Why no request can be answered; empty if some worker can be reached.
    trouble: str = ""
    #: How requests are served without NATS; empty while NATS is connected, or if none are served.
    without_broker: str = ""


NONE_REGISTERED = WorkerCheck(
    trouble="no decode worker is registered: start one, or wait until it has loaded its model"
)


def check_workers(
    roster: Roster, health: HealthMonitor, transport: RemoteGenerateClient
) -> WorkerCheck:
    """Whether requests can be sent to a decode worker, for `/ready`.

    With NATS, heartbeats show which workers respond. Without it, an open TCP connection does,
    because the connection of a process that has ended is broken. transport: connects to the
    members of `roster`.
    """
    workers = len(roster.members)
    if not workers:
        return NONE_REGISTERED
    if health.receives_heartbeats:
        if health.responsive:
            return WorkerCheck()
        return WorkerCheck(trouble=f"none of {workers} decode workers is responsive: {_SEE_LOGS}")
    connected = sum(
        transport.is_connected(member) and not health.is_known_unwell(member.lease_id)
        for member in health.members_or_all
    )
    if connected:
        return WorkerCheck(
            without_broker=f"Requests are still served: {connected} of {workers} decode workers are"
            " connected by TCP. Without heartbeats a worker that does not respond is not noticed."
        )
    return WorkerCheck(
        trouble=f"there are no heartbeats without NATS, and none of {workers} decode workers is"
        f" connected: {_SEE_LOGS}"
    )


class RequestDispatcher:
    """Its parts are opened in `stack`, and closed with it."""

    def __init__(self, config: FrontendConfig, spec: ProcessSpec, stack: AsyncExitStack):
        self._config, self._spec, self._stack = config, spec, stack
        self._roster: Roster | None = None
        self._workers: HealthMonitor | None = None
        self._failover: FailoverClient | None = None
        self._picker: Picker = RoundRobin()
        self._options: ComponentOptions | None = None

    async def watch_workers(self, host: Host) -> None:
        """To be called long before `open_intake`, so that the workers are known by then."""
        namespace, component = self._spec.namespace, self._spec.watch_component
        enter = self._stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, component, "generate")
        self._roster = await enter(Roster(host.store, prefix, host.drops))
        self._workers = await enter(
            HealthMonitor(
                host.messaging,
                self._roster,
                namespace=namespace,
                component=component,
                registry=host.registry,
                on_drop=host.drops,
            )
        )
        self._picker = await open_picker(self._stack, host, self._config, namespace, self._roster)

    async def open_intake(self, host: Host, on_deltas: OnDeltas, on_ended: OnEnded) -> "Intake":
        """Opens the failover client with the edge's callbacks, and admission over it.

        Imports vLLM, which takes seconds unless it was imported before.
        """
        from dynamo_lite.vllm.frontend.intake import Intake

        config = self._config
        failover = await self._open_failover(host, on_deltas, on_ended)
        admission = Admission(limits(config, {}))
        refused: Counter[str] = Counter()

        def apply(values: Values) -> None:
            admission.limit(limits(config, values))
            if isinstance(self._picker, KvPicker):
                self._picker.options = applied(values, config.kv_router, "kv_router")

        self._options = options = ComponentOptions(host, config, apply)
        await self._stack.enter_async_context(options.following())
        host.registry.register(RequestMetrics(failover.stats, refused, admission))
        return Intake(
            failover,
            members=self._candidates,
            admission=admission,
            refused=refused,
            client_priority=config.client_priority,
            tracer=host.tracer,
        )

    def check(self) -> WorkerCheck:
        if self._roster is None or self._workers is None or self._failover is None:
            return NONE_REGISTERED
        return check_workers(self._roster, self._workers, self._failover.transport)

    def facts(self) -> dict[str, Any]:
        return {
            "workers": len(self._roster.members) if self._roster is not None else 0,
            "responsive": len(self._workers.responsive) if self._workers is not None else 0,
            "options": self._options.facts() if self._options is not None else {},
        }

    async def _open_failover(
        self, host: Host, on_deltas: OnDeltas, on_ended: OnEnded
    ) -> FailoverClient:
        assert self._roster is not None and self._workers is not None
        self._failover = failover = await self._stack.enter_async_context(
            FailoverClient(
                partial(
                    RemoteGenerateClient,
                    f"{host.lease.id:x}",
                    on_drop=host.drops,
                    certificates=host.certificates,
                    component=self._spec.watch_component,
                ),
                members=self._candidates,
                picker=self._picker,
                on_deltas=on_deltas,
                on_ended=on_ended,
            )
        )
        changed = failover.members_changed
        await rotate(self._stack, self._roster, self._workers, failover.transport, changed)
        return failover

    def _candidates(self) -> Sequence[EndpointRecord]:
        """Workers for a new request: the responsive ones, or all if none is responsive."""
        return self._workers.members_or_all if self._workers is not None else ()


async def open_picker(
    stack: AsyncExitStack, host: Host, config: FrontendConfig, namespace: str, roster: Roster
) -> Picker:
    match config.router:
        case "random":
            return Random(random.Random().randrange)
        case "kv":
            return await open_kv_picker(stack, host, roster, config.kv_router)
        case "component":
            return await _open_remote_router(stack, host, namespace)
        case "round-robin":
            return RoundRobin()


async def _open_remote_router(stack: AsyncExitStack, host: Host, namespace: str) -> RemoteRouter:
    prefix = names.endpoint_prefix(namespace, "Router", "pick")
    routers = await stack.enter_async_context(Roster(host.store, prefix, host.drops))
    return await stack.enter_async_context(
        RemoteRouter(
            host.messaging,
            routers,
            namespace=namespace,
            lease_id=host.lease.id,
            fallback=RoundRobin(),
            registry=host.registry,
            on_drop=host.drops,
        )
    )
