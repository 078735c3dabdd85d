"""One simulated cluster: servers, supervised components, engines, the wire between them."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.runtime.etcd.lease import EtcdLease
from dynamo_lite.runtime.process.component import Component, Host, ProcessSpec
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent
from dynamo_lite.serve.services.decode_worker import VllmWorker
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from tests.simulation.client import SimFrontend, Story
from tests.simulation.engine.mover import Fabric, Wire
from tests.simulation.intruder import Intruder
from tests.simulation.invariants import Judge
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.loop.process import SimProcess, SimState
from tests.simulation.network.network import Network
from tests.simulation.parts import (
    SimParts,
    decode_options,
    model_options,
    prefill_options,
    surroundings,
)
from tests.simulation.planning import Planning
from tests.simulation.processes import NAMESPACE, Etcd, FaultInjector, Nats, Slot
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.servers.etcd import ETCD_URL, etcd_options
from tests.simulation.servers.nats_server import URL
from tests.simulation.shipped import Shipped
from tests.simulation.supervisor import STATE_DIR


class View(AsyncIterator[WatchEvent]):
    """The events of one watch."""

    def __init__(self, process: SimProcess, prefix: str, events: AsyncIterator[WatchEvent]):
        self.process, self.prefix = process, prefix
        #: The content after the events received so far; None before the first one.
        self.entries: dict[str, bytes] | None = None
        self._events = events

    def __aiter__(self) -> "View":
        return self

    async def __anext__(self) -> WatchEvent:
        event = await anext(self._events)
        match event:
            case Snapshot(entries):
                self.entries = dict(entries)
            case Put(key, value):
                assert self.entries is not None
                self.entries[key] = value
            case Delete(key):
                assert self.entries is not None
                self.entries.pop(key, None)
        return event


_GRACE_S = 20.0
#: A process that has been ready for this long is known to all others.
_KNOWN_S = 1.0


class World:
    """To be made and used outside of every simulated process."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario, shipped: Shipped):
        self.loop, self.scenario, self.shipped = loop, scenario, shipped
        self.network = Network(loop)
        self.judge = Judge(loop, scenario)
        self.fabric = Fabric(
            loop.stream("fabric"),
            Wire(slowest_s=scenario.slowest_write_s),
            on_landing=self.judge.landing,
            on_read=self.judge.reading,
            joined=lambda here, there: not self.network.is_cut(here, there),
        )
        self.intruder: Intruder | None = None
        if scenario.intruded:
            rng = loop.stream("intruder")
            self.intruder = Intruder(rng, self.fabric, self.judge.counts)
            self.fabric.on_notice = self.intruder.notified
        self.planning: Planning | None = None
        self.nats, self.etcd = Nats(self), Etcd(self)
        self.supervisors_rng = loop.stream("supervisors")
        self.slots = {name: Slot(self, name) for name in scenario.slots}
        self.clients: dict[str, SimFrontend] = {}
        self.prefill: dict[str, PrefillWorker] = {}
        #: Ready processes, and since when.
        self.ready: dict[str, float] = {}
        self.faults = FaultInjector(self)
        for host, ahead_s in scenario.clock_skews:
            loop.jump_wall(host, ahead_s)
        #: Of all open watches.
        self._views: dict[View, None] = {}
        if scenario.planner is not None:
            self.planning = Planning(self, scenario.planner)
        self.model = model_options(scenario)

    def start(self) -> None:
        for slot in self.slots.values():
            slot.start()
        if self.planning is not None:
            self.planning.start()

    def open_slot(self, name: str) -> None:
        """Adds it to the running graph."""
        self.slots[name] = Slot(self, name, alone=True)
        self.slots[name].start()

    # Requests

    def ask(self, ask: Ask) -> None:
        """Sends the request to its client, if that runs."""
        slot = self.slots.get(f"client-{ask.client}")
        client = None if slot is None else self.clients.get(slot.name)
        if slot is not None and client is not None and slot.process is not None:
            self.loop.call_soon(client.ask, ask, context=slot.process.context.copy())

    def unsettled(self) -> str | None:
        """The first thing that is not as before the first request; None if there is none."""
        if waiting := sorted(self.slots.keys() - self.ready.keys()):
            return f"{', '.join(waiting)} not ready"
        if stories := self.judge.requests.under_way():
            return f"{len(stories)} requests have not ended: {stories[0].ask.request_id}"
        if jobs := self.nats.jobs():
            return f"{len(jobs)} jobs on the queue"
        if self.planning is not None and (left := self.planning.unsettled()):
            return left
        return self.judge.unsettled() or self._differing_view()

    def left_keys(self) -> list[str]:
        """Keys in the store that should have gone with their processes."""
        target = names.planner_wanted_key(NAMESPACE)
        return [
            key for key in self.etcd.data.matching("") if self.planning is None or key != target
        ]

    async def stop(self, slots: Sequence[Slot], within_s: float) -> None:
        """Drains these processes, all at once."""
        for slot in slots:
            slot.stop()
        _, late = await asyncio.wait([slot.keeper for slot in slots], timeout=within_s)
        for task in late:
            self.judge.violate(f"{task.get_name()} did not end within {within_s:g} s")

    # What runs in the slots

    async def run(self, slot: Slot) -> int:
        """One incarnation; runs as its process."""
        process = self.loop.current_process()
        process.watchers.append(lambda _, state: self._changed(slot.name, state))
        kind, _, index = slot.name.partition("-")
        spec = ProcessSpec(
            namespace=NAMESPACE,
            component=slot.component,
            instance=int(index),
            nats_url=URL,
            etcd_url="",
            state_dir=STATE_DIR,
            lease_ttl_s=self.scenario.lease_ttl_s,
            grace_s=_GRACE_S,
            watch_component="VllmWorker",
        )

        def report(status: dict[str, Any]) -> None:
            reason = status.get("reason", status.get("error", status.get("detail", "")))
            self.loop.trace.add(f"{status['state']} {reason}")
            if status["state"] == "ready":
                self.ready[slot.name] = self.loop.time()
                slot.was_ready = True
            elif status.get("reason") == "lease revoked" and slot.host is not None:
                self.judge.lease_revoked(slot.name, slot.host.lease.id, self.etcd.revoked)

        component = self._component(kind, slot, spec, process)
        if self.planning is not None:
            component = self.planning.worker(slot, component)
        start = component.start

        async def start_in_slot(host: Host) -> Any:
            slot.host = host
            return await start(host)

        component.start = start_in_slot
        return await run_process(spec, component, report, surroundings(self, process))

    def _component(
        self, kind: str, slot: Slot, spec: ProcessSpec, process: SimProcess
    ) -> Component:
        if self.planning is not None and kind == "planner":
            return self.planning.planner(spec)
        if kind == "client":
            client = SimFrontend(self._on_story(slot.name), self.shipped)
            self.clients[slot.name] = client
            return client
        parts = SimParts(self, slot, process, self.loop.stream(f"{process}"))
        if kind == "prefill":
            options = prefill_options(self.scenario)
            worker = self.prefill[slot.name] = self.shipped.prefill_worker(options, parts)
            return worker
        return VllmWorker(decode_options(self.scenario), parts)

    def _on_story(self, name: str) -> Any:
        def on_story(story: Story) -> None:
            self.loop.trace.add(f"request {story.ask.request_id} comes")
            workers = [slot for slot in self.slots if slot.startswith("decode")]
            known = self.loop.time() - _KNOWN_S
            story.workers_up = all(
                self.ready.get(slot, math.inf) <= known for slot in (name, *workers)
            )
            if story.workers_up and self.nats.process.state is not SimState.RUNNING:
                self.judge.counts["requests without the broker"] += 1
            self.judge.requests.begun(name, story)

        return on_story

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[Store]:
        """For the running process, whose watches are recorded here."""
        process = self.loop.current_process()
        opened = self.shipped.store(ETCD_URL, **etcd_options(self.network))
        async with opened as store:
            watch = store.watch

            @contextlib.asynccontextmanager
            async def noted(prefix: str) -> AsyncIterator[Any]:
                async with watch(prefix) as events:
                    view = View(process, prefix, events)
                    self._views[view] = None
                    try:
                        yield view
                    finally:
                        del self._views[view]

            store.watch = noted
            yield store

    def _differing_view(self) -> str | None:
        """The first watch with another content than the store; None if all agree."""
        for view in self._views:
            held = self.etcd.data.matching(view.prefix)
            if not view.process.dead and view.entries != held:
                keys = sorted({*held, *(view.entries or ())})
                wrong = [key for key in keys if held.get(key) != (view.entries or {}).get(key)]
                return f"{view.process}: the watch on {view.prefix} is wrong about {wrong}"
        return None

    def lease_expired(self, lease_id: int) -> None:
        for slot in self.slots.values():
            if slot.host is not None and slot.host.lease.id == lease_id and slot.processes():
                lease = slot.host.lease
                assert isinstance(lease, EtcdLease)
                self.judge.lease_expired(slot.name, lease_id, lease.deadline)

    def _changed(self, name: str, state: SimState) -> None:
        if state is not SimState.DEAD:
            return
        if self.planning is not None:
            self.planning.judge.left(name)
        self.ready.pop(name, None)
        client = self.clients.pop(name, None)
        if client is not None:
            self.judge.requests.client_died(name)
            if client.client is not None:
                self.judge.counts["requests migrated"] += client.client.stats.moved.total()
        self.prefill.pop(name, None)
