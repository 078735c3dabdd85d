"""The Frontend's dispatcher: it knows the decode workers, and hands each request to one of them."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded
from dynamo_lite.routing.kv_routing import KvPicker
from dynamo_lite.routing.pickers import Picker, Random, RoundRobin
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.tasks import running
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.frontend.router_client import RemoteRouter
from dynamo_lite.serve.services.metrics import RequestMetrics
from dynamo_lite.serve.services.router import open_kv_picker

if TYPE_CHECKING:
    from dynamo_lite.vllm.frontend.intake import Intake

#: How long a worker may be unresponsive before its requests migrate.
MIGRATE_AFTER_S = 10.0
_LOOK_S = 0.2
_SEE_LOGS = "see `dynamo-lite ps` and their logs"


@dataclass(frozen=True)
class WorkerCheck:
    """At most one of the two texts is not empty."""

    #: Why no request can be answered; empty if some worker can be reached.
    trouble: str = ""
    #: How requests are served without NATS; empty while NATS is connected, or if none are served.
    without_broker: str = ""


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
        return WorkerCheck(
            trouble="no decode worker is registered: start one, or wait until it has loaded its"
            " model"
        )
    if health.receives_heartbeats:
        if health.responsive:
            return WorkerCheck()
        return WorkerCheck(trouble=f"none of {workers} decode workers is responsive: {_SEE_LOGS}")
    connected = sum(
        transport.is_connected(member) and not health.is_known_unwell(member.lease_id)
        for member in health.responsive or roster.members
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


async def rotate(
    stack: AsyncExitStack,
    roster: Roster,
    health: HealthMonitor,
    transport: RemoteGenerateClient,
) -> None:
    """Updates which workers get requests, and which ones lose theirs, until `stack` is closed.

    An unresponsive worker gets no new requests while another one is responsive. Its running
    requests wait for `MIGRATE_AFTER_S`, because a migration computes the prompt again. While no
    worker is responsive they stay.
    """

    def migrate_overdue() -> None:
        if not health.responsive:
            return
        for member in roster.members:
            why = health.trouble(member.lease_id)
            overdue = health.silent_for(member.lease_id) >= MIGRATE_AFTER_S
            if why and overdue and transport.is_connected(member):
                transport.drop(member, why)

    async def look() -> None:
        while True:
            migrate_overdue()
            await asyncio.sleep(_LOOK_S)

    transport.retain(roster.members)
    stack.enter_context(roster.on_change(lambda *_: transport.retain(roster.members)))
    stack.enter_context(health.on_change(lambda *_: migrate_overdue()))
    await stack.enter_async_context(running(look(), name="rotation"))


class RequestDispatcher:
    """Its parts are opened in `stack`, and closed with it."""

    def __init__(self, config: FrontendConfig, spec: ProcessSpec, stack: AsyncExitStack):
        self._config, self._component, self._stack = config, spec.watch_component, stack

    async def watch_workers(self, host: Host) -> None:
        """To be called long before `open_intake`, so that the workers are known by then."""
        namespace, enter = host.spec.namespace, self._stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, self._component, "generate")
        self._roster = await enter(Roster(host.store, prefix, host.drops))
        self._workers = await enter(
            HealthMonitor(
                host.messaging,
                self._roster,
                namespace=namespace,
                component=self._component,
                registry=host.registry,
                on_drop=host.drops,
            )
        )
        self._picker = await self._open_picker(host)

    async def open_intake(self, host: Host, on_deltas: OnDeltas, on_ended: OnEnded) -> "Intake":
        """Opens the failover client with the edge's callbacks, and admission over it.

        Imports vLLM, which takes seconds unless it was imported before.
        """
        from dynamo_lite.vllm.frontend.intake import Intake

        config, workers, roster = self._config, self._workers, self._roster

        def members() -> Members:
            return workers.responsive or roster.members

        connect = partial(
            RemoteGenerateClient,
            f"{host.lease.id:x}",
            on_drop=host.drops,
            certificates=host.certificates,
            component=self._component,
        )
        self._failover = failover = await self._stack.enter_async_context(
            FailoverClient(
                connect,
                members=members,
                picker=self._picker,
                on_deltas=on_deltas,
                on_ended=on_ended,
            )
        )
        await rotate(self._stack, roster, workers, failover.transport)
        admission = Admission(config)
        refused: Counter[str] = Counter()

        def apply(values: Values) -> None:
            admission.limit(applied(values, config))
            if isinstance(self._picker, KvPicker):
                self._picker.options = applied(values, config.kv_router, "kv_router")

        await self._stack.enter_async_context(host.live_options(config, apply))
        host.registry.register(RequestMetrics(failover.stats, refused, admission))
        return Intake(
            failover,
            members=members,
            admission=admission,
            refused=refused,
            client_priority=config.client_priority,
            tracer=host.tracer,
        )

    def check(self) -> WorkerCheck:
        return check_workers(self._roster, self._workers, self._failover.transport)

    def facts(self) -> dict[str, Any]:
        return {"workers": len(self._roster.members), "responsive": len(self._workers.responsive)}

    async def _open_picker(self, host: Host) -> Picker:
        match self._config.router:
            case "random":
                return Random(random.Random().randrange)
            case "kv":
                return await open_kv_picker(self._stack, host, self._roster, self._config.kv_router)
            case "component":
                return await self._open_remote_router(host)
            case "round-robin":
                return RoundRobin()

    async def _open_remote_router(self, host: Host) -> RemoteRouter:
        enter, namespace = self._stack.enter_async_context, host.spec.namespace
        prefix = names.endpoint_prefix(namespace, "Router", "pick")
        return await enter(
            RemoteRouter(
                host.messaging,
                await enter(Roster(host.store, prefix, host.drops)),
                namespace=namespace,
                lease_id=host.lease.id,
                registry=host.registry,
                on_drop=host.drops,
            )
        )
