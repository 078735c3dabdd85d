"""One simulated cluster: servers, supervised components, engines, the wire between them."""

import asyncio
import contextvars
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.runtime.etcd.lease_thread import ThreadedLease
from dynamo_lite.runtime.process.component import Component, ProcessSpec
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.decode_worker import VllmWorker
from dynamo_lite.services.prefill_worker import PrefillWorker
from tests.simulation.client import SimFrontend, Story
from tests.simulation.cluster import NAMESPACE, Etcd, Nats, Watched
from tests.simulation.engine.mover import Fabric, Wire
from tests.simulation.faults import FaultInjector
from tests.simulation.graph_supervisor import STATE_DIR
from tests.simulation.intruder import Intruder
from tests.simulation.invariants import Judge
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.loop.process import SimProcess, SimState
from tests.simulation.network.network import Network
from tests.simulation.parts import SimParts, surroundings
from tests.simulation.planning import Planning
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.servers.etcd_backend import etcd_backend
from tests.simulation.servers.nats_server import URL
from tests.simulation.shipped import Shipped
from tests.simulation.supervisor import SimLeaseRevoker, Slot
from tests.simulation.views import Views
from tests.simulation.worker_options import decode_options, model_options, prefill_options

_GRACE_S = 20.0
_COMPONENTS = {
    "client": "Frontend",
    "decode": "VllmWorker",
    "prefill": "PrefillWorker",
    "planner": "Planner",
}
#: A process that has been ready for this long is known to all others.
_KNOWN_S = 1.0


class World:
    """To be made and used outside of every simulated process."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario, shipped: Shipped):
        self.loop, self.scenario, self.shipped = loop, scenario, shipped
        self.network = Network(loop)
        self.judge = Judge(
            lambda: loop.time(),
            lambda text: loop.trace.add(text),
            faultless=not scenario.faults,
            only_broker_fails=scenario.only_broker_fails,
        )
        self.fabric = Fabric(
            loop.stream("fabric"),
            Wire(slowest_s=scenario.slowest_write_s),
            on_landing=self.judge.landing,
            on_read=self.judge.reading,
            joined=lambda here, there: not self.network.is_cut(here, there),
        )
        self._intruder: Intruder | None = None
        if scenario.intruded:
            rng = loop.stream("intruder")
            self._intruder = Intruder(rng, self.fabric, self.judge.counts)
            self.fabric.on_notice = self._intruder.notified
        self.planning: Planning | None = None
        self.nats = Nats(self.network, self._broker_started, self._broker_ended)
        self.etcd = Etcd(
            self.network, self._lease_expired, scenario.slowest_store_answer_s, self._store_wiped
        )
        self._revoker = SimLeaseRevoker(loop, self.judge, self._revoke)
        self.slots = {
            name: Slot(loop, name, self.judge, self._main, self._revoker) for name in scenario.slots
        }
        self.clients: dict[str, SimFrontend] = {}
        self.prefill: dict[str, PrefillWorker] = {}
        #: Ready processes, and since when.
        self.ready: dict[str, float] = {}
        self.faults = FaultInjector(
            self.network,
            self.slots,
            {"nats": self.nats, "etcd": self.etcd},
            self.etcd.revoke,
        )
        for host, ahead_s in scenario.clock_skews:
            loop.jump_wall(host, ahead_s)
        self._views = Views()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        if scenario.planner is not None:
            self.planning = Planning(
                self, scenario.planner, self.network, self.judge, self.etcd, scenario.lease_ttl_s
            )
        self._model = model_options(scenario)

    def start(self) -> None:
        for name, slot in self.slots.items():
            self._keepers[name] = self.loop.create_task(slot.keep(), name=f"keep {name}")
        if self.planning is not None:
            self.planning.start()

    # Slots that come and go

    def open_slot(self, name: str) -> Slot:
        slot = Slot(self.loop, name, self.judge, self._main, self._revoker, alone=True)
        self.slots[name] = slot
        keeper = self.loop.create_task(
            slot.keep(), name=f"keep {name}", context=contextvars.Context()
        )
        self._keepers[name] = keeper
        return slot

    def keeper_of(self, name: str) -> asyncio.Task[None]:
        return self._keepers[name]

    def close_slot(self, name: str) -> None:
        del self.slots[name]

    def lease_of(self, name: str) -> int:
        host = self.slots[name].host if name in self.ready and name in self.slots else None
        return 0 if host is None else host.lease.id

    # Requests

    def ask(self, ask: Ask) -> None:
        """Sends the request to its client, if that runs."""
        slot = self.slots[f"client-{ask.client}"]
        client = self.clients.get(slot.name)
        if client is not None and slot.process is not None and not slot.process.dead:
            self.loop.call_soon(client.ask, ask, context=slot.process.context.copy())

    def unsettled(self) -> str | None:
        """The first thing that is not as before the first request; None if there is none."""
        if waiting := sorted(self.slots.keys() - self.ready.keys()):
            return f"{', '.join(waiting)} not ready"
        if stories := self.judge.requests.under_way():
            return f"{len(stories)} requests have not ended: {stories[0].ask.request_id}"
        if jobs := self.nats.jobs():
            return f"{jobs} jobs on the queue"
        if self.planning is not None and (left := self.planning.unsettled()):
            return left
        return self.judge.unsettled() or self._views.differing(self.etcd.data)

    def left_keys(self) -> list[str]:
        """Keys in the store that should have gone with their processes."""
        target = names.planner_target_key(NAMESPACE)
        return [key for key in self.etcd.keys() if self.planning is None or key != target]

    async def stop(self, slots: Sequence[str], within_s: float) -> None:
        """Drains these processes, all at once."""
        for name in slots:
            self.slots[name].stop()
        keepers = [self._keepers[name] for name in slots]
        _, late = await asyncio.wait(keepers, timeout=within_s)
        for task in late:
            self.judge.violate(f"{task.get_name()} did not end within {within_s:g} s")

    # What runs in the slots

    async def _main(self, slot: Slot) -> int:
        """One incarnation; runs as its process."""
        process = self.loop.current_process()
        process.watchers.append(lambda _, state: self._changed(slot.name, state))
        kind, _, index = slot.name.partition("-")
        spec = ProcessSpec(
            namespace=NAMESPACE,
            component=_COMPONENTS[kind],
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
        return await run_process(
            spec,
            Watched(component, slot),
            report,
            surroundings(
                self.network,
                process,
                self.open_store,
                self.judge.heard,
                self.judge.said,
                self._intruder,
                with_status=self.planning is not None,
            ),
        )

    def _component(
        self, kind: str, slot: Slot, spec: ProcessSpec, process: SimProcess
    ) -> Component:
        if self.planning is not None and (planner := self.planning.planner(kind, spec)):
            return planner
        if kind == "client":
            on_story = self._on_story(slot.name)
            client = SimFrontend(spec, on_story, self.shipped)
            self.clients[slot.name] = client
            return client
        parts = SimParts(
            network=self.network,
            open_store=self.open_store,
            fabric=self.fabric,
            judge=self.judge,
            shipped=self.shipped,
            model=self._model,
            slot=slot,
            process=process,
            rng=self.loop.stream(f"{process}"),
            intruder=self._intruder,
        )
        if kind == "prefill":
            options = prefill_options(self.scenario)
            worker = self.prefill[slot.name] = self.shipped.prefill_worker(options, spec, parts)
            return worker
        return VllmWorker(decode_options(self.scenario), spec, parts)

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

    def open_store(self) -> AbstractAsyncContextManager[Store]:
        opened = self.shipped.store(etcd_backend(self.network))
        return self._views.seen(opened, self.loop.current_process())

    def _revoke(self, host: str, lease_id: int) -> bool:
        """As the supervisor on this host. Returns whether the lease was revoked."""
        reached = self.etcd.process.state is SimState.RUNNING
        reached = reached and not self.network.is_cut(host, "etcd")
        return reached and self.etcd.revoke(lease_id)

    def _lease_expired(self, lease_id: int) -> None:
        for slot in self.slots.values():
            if slot.host is not None and slot.host.lease.id == lease_id and slot.processes():
                lease = slot.host.lease
                assert isinstance(lease, ThreadedLease)
                self.judge.lease_expired(slot.name, lease_id, lease.deadline)

    def _broker_started(self) -> None:
        self.judge.broker_started()
        if self.planning is not None:
            self.planning.broker_started()

    def _broker_ended(self) -> None:
        if self.planning is not None:
            self.planning.broker_ended()

    def _store_wiped(self) -> None:
        if self.planning is not None:
            self.planning.judge.wiped()

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
        worker = self.prefill.pop(name, None)
        host = self.slots[name].host if name in self.slots else None
        if worker is not None and host is not None and not self.nats.process.dead:
            self.judge.prefill_worker_died(worker, host.lease.id, self.nats.attempts())
