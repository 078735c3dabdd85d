"""A supervisor in memory, workers that only answer, and planners on real servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

from prometheus_client import CollectorRegistry

from dynamo_lite.planner.connector import Connector, Counted, Order
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.target import Target
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import Refused
from dynamo_lite.protocol.planner import LeaderRecord, OperationRecord, RoleCounts, TargetRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.process.status import StatusServer
from tests.builders import endpoint_record, eventually, process_spec, register
from tests.process.prefill_reports import Period, PrefillReports

P, D = "PrefillWorker", "VllmWorker"
TICK_S = 0.1


class FakeSupervisor:
    """Implements Connector. `stop_at` names the moment at which a call never returns:
    `add before`, `add after`, `remove before`, `remove after`, `prefer after`."""

    def __init__(self, *, chooses_victim: bool = True):
        self.chooses_victim = chooses_victim
        self.devices_each = self.devices_free = 0
        #: How often `counts` was called.
        self.looks = 0
        self.ready = {P: 1, D: 1}
        self.starting = {P: 0, D: 0}
        self.draining: dict[str, set[int]] = {P: set(), D: set()}
        self.version = 0
        self.orders: list[tuple[str, Order]] = []
        self.instant = True
        self.stop_at = ""
        self.stopped = asyncio.Event()
        self.away = False

    async def counts(self) -> Counted:
        self.looks += 1
        if self.away:
            raise Refused("away", elsewhere=False)
        return Counted(
            {
                c: RoleCounts(
                    starting=self.starting[c],
                    ready=self.ready[c],
                    draining=len(self.draining[c]),
                    devices_each=self.devices_each,
                    devices_free=self.devices_free,
                )
                for c in (P, D)
            },
            self.version,
        )

    async def add(self, order: Order) -> None:
        await self._moment("add before")
        self._take("add", order)
        self.starting[order.component] += 1
        if self.instant:
            self.finish_starts()
        await self._moment("add after")

    async def prefer(self, order: Order) -> None:
        self.orders.append(("prefer", order))
        await self._moment("prefer after")

    async def remove(self, order: Order) -> None:
        await self._moment("remove before")
        self._take("remove", order)
        if not order.lease_id:
            self.starting[order.component] -= 1
        elif not self.chooses_victim:
            self.ready[order.component] = min(self.ready[order.component], order.count)
        elif order.lease_id not in self.draining[order.component]:
            self.ready[order.component] -= 1
            self.draining[order.component].add(order.lease_id)
        if self.instant:
            self.finish_drains()
        await self._moment("remove after")

    def removable(self, component: str, hosts: Collection[str]) -> Collection[str]:
        return hosts

    def _take(self, what: str, order: Order) -> None:
        if order.version <= self.version:
            raise Refused("an old version", elsewhere=False)
        self.version = order.version
        self.orders.append((what, order))

    def finish_starts(self) -> None:
        for component in (P, D):
            self.ready[component] += self.starting[component]
            self.starting[component] = 0

    def finish_drains(self) -> None:
        self.draining = {P: set(), D: set()}

    async def _moment(self, name: str) -> None:
        if self.stop_at == name:
            self.stop_at = ""
            self.stopped.set()
            await asyncio.Event().wait()

    def taken(self, what: str) -> list[Order]:
        return [order for kind, order in self.orders if kind == what]


class Bench:
    """Servers, workers and planners of one namespace."""

    def __init__(self, nats_url: str, etcd_url: str, namespace: str, supervisor: FakeSupervisor):
        self.nats_url, self.etcd_url, self.namespace = nats_url, etcd_url, namespace
        self.supervisor = supervisor
        self.store = EtcdStore(etcd_url)
        self.messaging = NatsMessaging(nats_url)
        self.facts: dict[str, Any] = {
            "ok": True,
            "state": "ready",
            "running": 0,
            "waiting": 0,
            "kv_usage": 0.0,
            "in_flight": 0,
            "jobs": 0,
            "writers": [],
            "writers_age_s": 0.0,
        }
        self._stack = AsyncExitStack()
        self.leases: dict[int, Any] = {}
        self.latest: Planner | None = None

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await enter(self.store)
        await enter(self.messaging)
        registry = CollectorRegistry()
        self._reports = PrefillReports(registry)
        self._status = await enter(StatusServer(lambda: self.facts, registry))
        self.target = Target(self.store, self.namespace, "tester@here", SYSTEM_CLOCK)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def worker(self, component: str) -> int:
        """A registered worker that answers. Returns its lease id."""
        endpoint = "generate" if component == D else "prefill"
        lease = await self._stack.enter_async_context(self.store.lease(10))
        record = endpoint_record(
            lease.id,
            component,
            endpoint,
            namespace=self.namespace,
            host=f"host-{lease.id:x}",
            status_url=self._status.url,
        )
        await register(self.store, record, lease=lease)
        self.leases[lease.id] = lease
        return lease.id

    @contextlib.asynccontextmanager
    async def planner(
        self, instance: int = 0, connector: Connector | None = None, **options: Any
    ) -> AsyncIterator["Running"]:
        """Runs until the context ends, which is an abrupt end for the planner's work."""
        config = {"tick_s": TICK_S, "budget_devices": 8, **options}
        spec = process_spec(
            "Planner",
            namespace=self.namespace,
            instance=instance,
            nats_url=self.nats_url,
            etcd_url=self.etcd_url,
            lease_ttl_s=10.0,
            grace_s=1.0,
        )
        planner = self.latest = Planner(config, spec, connector or self.supervisor)
        reports: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        task = asyncio.create_task(run_process(spec, planner, reports.put_nowait))
        try:
            running = Running(planner)
            async with asyncio.timeout(20):
                while (report := await reports.get())["state"] != "ready":
                    assert report["state"] == "starting", report
            running.lease_id = int(report["lease"], 16)
            yield running
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def leader(self) -> int:
        value = await self.store.get(names.planner_leader_key(self.namespace))
        return decode_json(value, LeaderRecord).lease_id if value else 0

    async def operations(self) -> list[OperationRecord]:
        prefix = names.planner_operations_prefix(self.namespace)
        found = await self.store.get_prefix(prefix)
        return [decode_json(value, OperationRecord) for value in found.values()]

    async def target_record(self) -> TargetRecord | None:
        value = await self.store.get(names.planner_target_key(self.namespace))
        return decode_json(value, TargetRecord) if value else None

    async def want(self, **manual: int) -> None:
        await self.target.set_manual(manual, "a test")

    async def until_settled(self, within_s: float = 20.0, **ready: int) -> None:
        """Waits until there are this many workers and no operation is in progress."""

        async def settled() -> bool:
            return self.supervisor.ready == {P: 1, D: 1, **ready} and not await self.operations()

        await eventually(settled, within_s)

    def overflow(self, tokens: int) -> None:
        """The workers report prompts for which the queue had no room."""
        self._reports.add(Period(overflow=tokens))


class Running:
    """A planner that runs."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self.lease_id = 0

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.planner.health()["planner"]
