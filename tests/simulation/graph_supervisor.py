"""The supervisor of a simulated graph: it adds and removes workers as the one of `serve` does, or
as Kubernetes does, which decides by itself which worker ends."""

import asyncio
import contextvars
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.planner import (
    SUPERVISOR_SOCKET,
    RoleCounts,
    SupervisorRequest,
    Want,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.serve.supervisor_socket import Orders
from tests.simulation.network.network import Network
from tests.simulation.supervisor import Slot

if TYPE_CHECKING:
    from tests.simulation.planner_invariants import PlannerJudge
    from tests.simulation.world import World

#: Of the graph; there is no such folder.
STATE_DIR = "/sim"
#: Component to the beginning of its slots' names.
SLOTS = {"VllmWorker": "decode", "PrefillWorker": "prefill"}
#: Longer than any drain: then it is killed.
_DRAIN_S = 60.0

_decode_request = msgspec.json.Decoder(SupervisorRequest).decode
_encode = msgspec.json.Encoder().encode


class Worker:
    """A worker that the supervisor keeps running."""

    def __init__(self, component: str, slot: Slot, world: "World"):
        self.component, self.slot, self._world = component, slot, world
        #: When it was started for the first time.
        self.began = world.loop.time()
        self.retired = False
        self.ended = False
        #: Kubernetes ends it before others.
        self.preferred = False
        #: Its lease when it was retired, or told to leave.
        self.last_lease = 0

    @property
    def lease_id(self) -> int:
        return self._world.lease_of(self.slot.name)

    @property
    def phase(self) -> Literal["starting", "ready", "draining", "ended"]:
        if self.ended:
            return "ended"
        if self.retired:
            return "draining"
        return "ready" if self.slot.was_ready else "starting"


class SimSupervisor:
    """devices: of the host; each worker has one. Orders have versions, as those of `serve`.
    watcher: sees each order before and after it is carried out, with the name of its sender."""

    watcher: "PlannerJudge"

    def __init__(self, world: "World", devices: int):
        self._world, self._devices = world, devices
        self._workers: dict[str, list[Worker]] = {name: [] for name in SLOTS}
        self._tasks = OwnedTasks()
        self.orders = Orders(self.counts)

    def listen(self, network: Network) -> None:
        """At the socket that the shipped clients open."""
        process = network.loop.add_process("supervisor")
        server = process.run(network.create_server, lambda: _Connection(self), "supervisor", 1)
        path = f"{STATE_DIR}/{SUPERVISOR_SOCKET}"
        network.unix_sockets[path] = server.sockets[0].getsockname()[1]

    def keep(self, component: str, slot: Slot) -> None:
        worker = Worker(component, slot, self._world)
        self._workers[component].append(worker)
        # The worker outlives the planner, even if a planner's call has started it.
        until_ended = self._until_ended(worker)
        self._tasks.start(until_ended, name=f"keeps {slot.name}", context=contextvars.Context())

    @property
    def workers(self) -> Iterable[Worker]:
        return (one for workers in self._workers.values() for one in workers)

    def counts(self) -> dict[str, RoleCounts]:
        free = self._devices - sum(one.phase != "ended" for one in self.workers)
        found: dict[str, RoleCounts] = {}
        for name, workers in self._workers.items():
            phases = [one.phase for one in workers]
            found[name] = RoleCounts(
                starting=phases.count("starting"),
                ready=phases.count("ready"),
                draining=phases.count("draining"),
                devices_each=1,
                devices_free=max(free, 0),
                leases=tuple(one.lease_id for one in workers if one.lease_id),
            )
        return found

    def carry_out(self, who: str, order: Want) -> None:
        """Raises Refused."""
        while (number := self.number(order.component)) < order.count:
            self.add(who, order.component)
        for worker in self.to_end(order.component, number - order.count, order.leases):
            if worker.phase in ("starting", "ready"):
                self.watcher.removing(who, worker)
                self.end(worker)

    def number(self, component: str) -> int:
        """Of its workers, without draining ones."""
        counts = self.counts()[component]
        return counts.starting + counts.ready

    def add(self, who: str, component: str) -> None:
        """Raises Refused."""
        if not self.counts()[component].devices_free:
            raise Refused(f"{component}: no device is free", elsewhere=False)
        self.watcher.adding(who, component)
        workers = self._workers[component]
        taken = {one.slot.name for one in workers if not one.ended}
        kind = SLOTS[component]
        name = next(f"{kind}-{i}" for i in range(1000) if f"{kind}-{i}" not in taken)
        workers[:] = [one for one in workers if one.slot.name != name]
        self.keep(component, self._world.open_slot(name))
        self.watcher.added(component)

    def to_end(self, component: str, number: int, leases: Sequence[int]) -> list[Worker]:
        """As `Fleet.to_retire`."""
        if number <= 0:
            return []
        workers = self._workers[component]
        found = [self.named(component, lease) for lease in leases]
        found += [one for one in reversed(workers) if one.phase == "starting"]
        found += [one for one in reversed(workers) if one.phase == "ready" and not one.lease_id]
        if len(found) < number:
            raise Refused(f"{component}: no process is starting", elsewhere=False)
        return found[:number]

    def named(self, component: str, lease_id: int) -> Worker:
        """Raises Refused."""
        for one in self._workers[component]:
            if lease_id in (one.lease_id, one.last_lease):
                return one
        raise Refused(f"{component}: no process has lease {lease_id:x}", elsewhere=False)

    def end(self, worker: Worker) -> None:
        """Drains it; it is not started again."""
        worker.last_lease = worker.lease_id
        worker.retired = True
        worker.slot.stop()

    async def _until_ended(self, worker: Worker) -> None:
        name = worker.slot.name
        keeper = self._world.keeper_of(name)
        while not keeper.done():
            await asyncio.wait([keeper], timeout=_DRAIN_S)
            if worker.retired and not keeper.done():
                worker.slot.kill()
                await asyncio.wait([keeper])
        worker.ended = True
        self._world.close_slot(name)


class _Connection(asyncio.Protocol):
    """JSON lines."""

    def __init__(self, supervisor: SimSupervisor):
        self._supervisor = supervisor
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._who = transport.get_extra_info("peername")[0]

    def data_received(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            request = _decode_request(line)
            carry_out = partial(self._supervisor.carry_out, self._who)
            self._transport.write(
                _encode(self._supervisor.orders.answer(request, carry_out)) + b"\n"
            )


class SimPods:
    """Implements Connector for the planner `who`. A request and its answer take the network's
    time each, so that a planner may end between the two."""

    def __init__(self, supervisor: SimSupervisor, network: Network, who: str):
        self._supervisor, self._network, self._who = supervisor, network, who
        self._seen: dict[str, int] = {}

    async def counts(self) -> Mapping[str, RoleCounts]:
        await self._way()
        counts = self._supervisor.counts()
        self._seen = {name: self._supervisor.number(name) for name in counts}
        await self._way()
        return counts

    async def change(
        self, component: str, count: int, victim: EndpointRecord | None = None
    ) -> None:
        """Raises Unavailable also if the number has changed. Ends preferred workers first."""
        await self._way()
        if victim is not None:
            # The pod is still preferred when its container was restarted.
            self._supervisor.named(component, victim.lease_id).preferred = True
            await self._way()
        number = self._supervisor.number(component)
        if number not in (count, self._seen.get(component)):
            raise Unavailable("another client has changed the number")
        for _ in range(count - number):
            self._supervisor.add(self._who, component)
        for _ in range(number - count):
            self._remove(component)
        await self._way()

    def _remove(self, component: str) -> None:
        there = [one for one in self._supervisor.workers if one.component == component]
        there = [one for one in there if one.phase in ("starting", "ready")]
        worker = min(there, key=lambda one: (one.phase == "ready", not one.preferred, -one.began))
        self._supervisor.watcher.removing(self._who, worker)
        self._supervisor.end(worker)

    def owns(self, worker: EndpointRecord) -> bool:
        return True

    async def _way(self) -> None:
        """Raises Unavailable."""
        if self._network.is_cut(self._who, "supervisor"):
            await asyncio.sleep(1.0)
            raise Unavailable("the API server does not answer")
        await asyncio.sleep(self._network.delay_s())
