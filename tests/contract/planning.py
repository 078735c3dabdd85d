"""A supervisor in memory, workers that only answer, and planners on real servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry

from dynamo_lite.planner.connector import Connector
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.record import edit
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.planner import LeaderRecord, RoleCounts, WantedRecord
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.process.status import StatusServer
from tests.builders import endpoint_record, eventually, process_spec, register
from tests.process.prefill_reports import Period, PrefillReports

P, D = "PrefillWorker", "VllmWorker"
TICK_S = 0.1


@dataclass(frozen=True)
class Order:
    component: str
    count: int
    lease_id: int = 0


class FakeSupervisor:
    """Implements Connector. `stop_at` names the moment at which a call never returns:
    `add before`, `add after`, `remove before`, `remove after`. A change to fewer workers is a
    removal."""

    def __init__(self) -> None:
        self.devices_each = self.devices_free = 0
        self.ready = {P: 1, D: 1}
        self.starting = {P: 0, D: 0}
        self.draining: dict[str, set[int]] = {P: set(), D: set()}
        self.orders: list[tuple[str, Order]] = []
        self.instant = True
        self.stop_at = ""
        self.stopped = asyncio.Event()

    async def counts(self) -> Mapping[str, RoleCounts]:
        return {
            c: RoleCounts(
                starting=self.starting[c],
                ready=self.ready[c],
                draining=len(self.draining[c]),
                devices_each=self.devices_each,
                devices_free=self.devices_free,
            )
            for c in (P, D)
        }

    async def change(
        self, component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        lease_id = 0 if victim is None else victim.lease_id
        own = self.starting[component] + self.ready[component]
        what = "add" if count > own else "remove"
        await self._moment(f"{what} before")
        self.orders.append((what, Order(component, count, lease_id)))
        if count > own:
            self.starting[component] += count - own
        elif not lease_id:
            starting = min(self.starting[component], own - count)
            self.starting[component] -= starting
            self.ready[component] -= own - count - starting
        elif lease_id not in self.draining[component]:
            assert count == own - 1
            self.ready[component] -= 1
            self.draining[component].add(lease_id)
        if self.instant:
            self.finish_starts()
            self.finish_drains()
        await self._moment(f"{what} after")

    def owns(self, worker: EndpointRecord) -> bool:
        return True

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
        planner = self.latest = Planner(config, connector or self.supervisor)
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

    async def wanted(self) -> WantedRecord:
        value = await self.store.get(names.planner_wanted_key(self.namespace))
        return decode_json(value, WantedRecord) if value else WantedRecord()

    async def want(self, **manual: int) -> None:
        await self.edit(manual=manual)

    async def edit(self, **changes: Any) -> None:
        await edit(
            self.store, self.namespace, lambda record: msgspec.structs.replace(record, **changes)
        )

    async def until_settled(self, within_s: float = 20.0, **ready: int) -> None:
        """Waits until there are this many workers, and nothing is under way."""

        async def settled() -> bool:
            supervisor = self.supervisor
            draining = supervisor.draining[P] | supervisor.draining[D]
            there = supervisor.ready == {P: 1, D: 1, **ready}
            return there and not draining and not (await self.wanted()).manual

        await eventually(settled, within_s)

    async def until_reached(self) -> None:
        """Waits until no number is set that is not reached."""

        async def reached() -> bool:
            return not (await self.wanted()).manual

        await eventually(reached, 20)

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

    def failures(self, what: str) -> float:
        """As they are counted in the metric."""
        return self.planner._metrics.failures.labels(what)._value.get()
