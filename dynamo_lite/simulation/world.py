"""One simulated cluster: servers, supervised components, engines, the wire between them."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.prefill import decode_job
from dynamo_lite.queue.base import QueueOptions
from dynamo_lite.runtime.etcd.lease_thread import ThreadedLease
from dynamo_lite.runtime.process.component import Component, Host, ProcessSpec
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.store import Store
from dynamo_lite.services.config import PrefillWorkerConfig, VllmWorkerConfig
from dynamo_lite.services.decode_worker import VllmWorker
from dynamo_lite.services.prefill_worker import PrefillWorker
from dynamo_lite.simulation.client import SimFrontend, Story
from dynamo_lite.simulation.engine.core import SimModelConfig
from dynamo_lite.simulation.engine.mover import Fabric, Wire
from dynamo_lite.simulation.faults import FaultInjector
from dynamo_lite.simulation.invariants import Judge
from dynamo_lite.simulation.loop.loop import VirtualLoop
from dynamo_lite.simulation.loop.process import SimProcess, State
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.parts import SimParts, surroundings
from dynamo_lite.simulation.scenario import Ask, Scenario
from dynamo_lite.simulation.servers.etcd import EtcdServer
from dynamo_lite.simulation.servers.etcd_backend import etcd_backend
from dynamo_lite.simulation.servers.etcd_data import EtcdData
from dynamo_lite.simulation.servers.nats_server import URL, NatsServer
from dynamo_lite.simulation.shipped import Shipped
from dynamo_lite.simulation.supervisor import SimLeaseRevoker, Slot
from dynamo_lite.simulation.views import Views

NAMESPACE = "sim"
_GRACE_S = 20.0
_LOCAL_TOKENS, _SHORT_TOKENS = 12, 30
#: One block: every prefix that can be read is read.
_READ_TOKENS = 4
#: A process that has been ready for this long is known to all others.
_KNOWN_S = 1.0
#: How often a wiped etcd has the same cluster id as before, and how often an etcd that is
#: restarted with its data has compacted its history.
_SAME_CLUSTER, _COMPACTED = 0.7, 0.3


class Nats:
    """Implements the faults' Server. Its queues are in memory, and are lost with its process."""

    def __init__(self, network: Network, on_start: Callable[[], None]):
        self._network, self._on_start = network, on_start
        self.start()

    def start(self, *, wiped: bool = False) -> None:
        self.process: SimProcess = self._network.loop.add_process("nats")
        self.server = NatsServer(self._network, self.process)
        self._on_start()

    def attempts(self) -> set[str]:
        """The attempts with a job on the queue, waiting or pulled."""
        return {decode_job(payload).attempt for payload in self._payloads()}

    def jobs(self) -> int:
        """How many jobs are on the prefill queue, waiting or pulled."""
        return len(self._payloads())

    def _payloads(self) -> list[bytes]:
        return self.server.jetstream.payloads(names.prefill_stream(NAMESPACE))


class Etcd:
    """Implements the faults' Server. on_expiry, slowest_answer_s: see `EtcdServer`."""

    def __init__(self, network: Network, on_expiry: Callable[[int], None], slowest_answer_s: float):
        self._network, self._on_expiry = network, on_expiry
        self._slowest_answer_s = slowest_answer_s
        self._random = network.loop.stream("etcd").random
        self.data = EtcdData()
        #: Leases that the faults have revoked, or that their owners must take for revoked.
        self.revoked: set[int] = set()
        self.start()

    def start(self, *, wiped: bool = False) -> None:
        self.process: SimProcess = self._network.loop.add_process("etcd")
        if wiped:
            leases = self.data.leases.items()
            self.revoked |= {i for i, lease in leases if lease.unmarked and not lease.keys}
            self.data = self.data.wiped(same_cluster=self._random() < _SAME_CLUSTER)
        elif self._random() < _COMPACTED:
            self.data.compact(self.data.revision)
        self.server = EtcdServer(
            self._network,
            self.process,
            self.data,
            on_expiry=self._on_expiry,
            slowest_answer_s=self._slowest_answer_s,
        )

    def revoke(self, lease_id: int) -> bool:
        """Returns whether there was such a lease."""
        found = not self.process.dead and self.server.revoke(lease_id)
        if found:
            self.revoked.add(lease_id)
        return found

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self.data.keys)


class Watched:
    """A component that gives its host to its slot."""

    def __init__(self, inner: Component, slot: Slot):
        self._inner, self._slot = inner, slot

    async def start(self, host: Host) -> Any:
        self._slot.host = host
        return await self._inner.start(host)

    async def drain(self, grace_s: float) -> None:
        await self._inner.drain(grace_s)

    async def close(self) -> None:
        await self._inner.close()

    def health(self) -> Any:
        return self._inner.health()


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
        self.nats = Nats(self.network, self.judge.broker_started)
        self.etcd = Etcd(self.network, self._lease_expired, scenario.slowest_store_answer_s)
        revoker = SimLeaseRevoker(loop, self.judge, self._revoke)
        self.slots = {
            name: Slot(loop, name, self.judge, self._main, revoker) for name in scenario.slots
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
        self._model = SimModelConfig(
            num_blocks=scenario.num_blocks,
            max_model_len=4 * (scenario.num_blocks - 1),
            token_s=scenario.token_s,
        )

    def start(self) -> None:
        for name, slot in self.slots.items():
            self._keepers[name] = self.loop.create_task(slot.keep(), name=f"keep {name}")

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
        if stories := self.judge.open_stories():
            return f"{len(stories)} requests have not ended: {stories[0].ask.request_id}"
        if jobs := self.nats.jobs():
            return f"{jobs} jobs on the queue"
        return self.judge.unsettled() or self._views.differing(self.etcd.data)

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
        component = {"client": "Frontend", "decode": "VllmWorker", "prefill": "PrefillWorker"}
        spec = ProcessSpec(
            namespace=NAMESPACE,
            component=component[kind],
            instance=int(index),
            nats_url=URL,
            etcd_url="",
            state_dir="",
            lease_ttl_s=self.scenario.lease_ttl_s,
            grace_s=_GRACE_S,
            watch_component="VllmWorker",
        )

        def report(status: dict[str, Any]) -> None:
            reason = status.get("reason", status.get("error", status.get("detail", "")))
            self.loop.trace.add(f"{status['state']} {reason}")
            if status["state"] == "ready":
                self.ready[slot.name] = self.loop.time()
            elif status.get("reason") == "lease revoked" and slot.host is not None:
                self.judge.lease_revoked(slot.name, slot.host.lease.id, self.etcd.revoked)

        return await run_process(
            spec,
            Watched(self._component(kind, slot, spec, process), slot),
            report,
            surroundings(
                self.network, process, self._open_store, self.judge.heard, self.judge.said
            ),
        )

    def _component(
        self, kind: str, slot: Slot, spec: ProcessSpec, process: SimProcess
    ) -> Component:
        scenario = self.scenario
        if kind == "client":
            on_story = self._on_story(slot.name)
            client = SimFrontend(spec, on_story, self.shipped)
            self.clients[slot.name] = client
            return client
        parts = SimParts(
            network=self.network,
            open_store=self._open_store,
            fabric=self.fabric,
            judge=self.judge,
            shipped=self.shipped,
            model=self._model,
            slot=slot,
            process=process,
            rng=self.loop.stream(f"{process}"),
        )
        queue = QueueOptions(
            max_jobs=scenario.max_jobs,
            ack_wait_s=scenario.ack_wait_s,
            max_deliver=scenario.max_deliver,
            order="fifo" if scenario.seed % 4 == 0 else "short-first",
            short_length=_SHORT_TOKENS,
        )
        if kind == "prefill":
            made = _plain(
                PrefillWorkerConfig(
                    queue=queue,
                    kv_checksum_rate=scenario.kv_checksum_rate,
                    min_prefix_read_length=_READ_TOKENS,
                )
            )
            worker = self.prefill[slot.name] = self.shipped.prefill_worker(made, spec, parts)
            return worker
        config = VllmWorkerConfig(
            max_local_prefill_length=_LOCAL_TOKENS,
            remote_prefill_timeout_s=scenario.remote_prefill_timeout_s,
            queue=queue,
            kv_events=False,
        )
        return VllmWorker(_plain(config), spec, parts)

    def _on_story(self, name: str) -> Any:
        def on_story(story: Story) -> None:
            self.loop.trace.add(f"request {story.ask.request_id} comes")
            workers = [slot for slot in self.slots if slot.startswith("decode")]
            known = self.loop.time() - _KNOWN_S
            story.workers_up = all(
                self.ready.get(slot, math.inf) <= known for slot in (name, *workers)
            )
            if story.workers_up and self.nats.process.state is not State.RUNNING:
                self.judge.counts["requests without the broker"] += 1
            self.judge.story(name, story)

        return on_story

    def _open_store(self) -> AbstractAsyncContextManager[Store]:
        opened = self.shipped.store(etcd_backend(self.network))
        return self._views.seen(opened, self.loop.current_process())

    def _revoke(self, host: str, lease_id: int) -> bool:
        """As the supervisor on this host. Returns whether the lease was revoked."""
        reached = self.etcd.process.state is State.RUNNING
        reached = reached and not self.network.is_cut(host, "etcd")
        return reached and self.etcd.revoke(lease_id)

    def _lease_expired(self, lease_id: int) -> None:
        for slot in self.slots.values():
            if slot.host is not None and slot.host.lease.id == lease_id and slot.processes():
                lease = slot.host.lease
                assert isinstance(lease, ThreadedLease)
                self.judge.lease_expired(slot.name, lease_id, lease.deadline)

    def _changed(self, name: str, state: State) -> None:
        if state is not State.DEAD:
            return
        self.ready.pop(name, None)
        client = self.clients.pop(name, None)
        if client is not None:
            self.judge.client_died(name)
        worker = self.prefill.pop(name, None)
        host = self.slots[name].host
        if worker is not None and host is not None and not self.nats.process.dead:
            self.judge.prefill_worker_died(worker, host.lease.id, self.nats.attempts())


def _plain(config: Any) -> dict[str, Any]:
    return msgspec.to_builtins(config)
