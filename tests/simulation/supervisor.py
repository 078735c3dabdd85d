"""The supervisor of a simulated graph: it adds and removes workers as the one of `serve` does, or
as Kubernetes does, which decides by itself which worker ends."""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.planner import (
    SUPERVISOR_SOCKET,
    RoleCounts,
    SupervisorRequest,
    Want,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.serve.supervisor_socket import Orders
from tests.simulation.network.network import Network
from tests.simulation.processes import COMPONENTS, Slot

if TYPE_CHECKING:
    from tests.simulation.planner_invariants import PlannerJudge
    from tests.simulation.world import World

#: Of the graph; there is no such folder.
STATE_DIR = "/sim"
#: Component to the beginning of its slots' names.
SLOTS = {COMPONENTS[kind]: kind for kind in ("decode", "prefill")}

_decode_request = msgspec.json.Decoder(SupervisorRequest).decode
_encode = msgspec.json.Encoder().encode


class SimSupervisor:
    """devices: of the host; each worker has one. Orders have versions, as those of `serve`.
    watcher: sees each order before and after it is carried out, with the name of its sender."""

    watcher: "PlannerJudge"

    def __init__(self, world: "World", devices: int):
        self._world, self._devices = world, devices
        self.orders = Orders(self.counts)

    def listen(self, network: Network) -> None:
        """At the socket that the shipped clients open."""
        process = network.loop.add_process("supervisor")
        server = process.run(network.create_server, self._connection, "supervisor", 1)
        path = f"{STATE_DIR}/{SUPERVISOR_SOCKET}"
        network.unix_sockets[path] = server.sockets[0].getsockname()[1]

    def workers(self, component: str) -> list[Slot]:
        """In the order of their start."""
        return [slot for slot in self._world.slots.values() if slot.component == component]

    def counts(self) -> dict[str, RoleCounts]:
        workers = {component: self.workers(component) for component in SLOTS}
        free = self._devices - sum(len(slots) for slots in workers.values())
        return {name: _counts(slots, max(free, 0)) for name, slots in workers.items()}

    def carry_out(self, who: str, order: Want) -> None:
        """Raises Refused."""
        while (number := self.number(order.component)) < order.count:
            self.add(who, order.component)
        for worker in self.to_end(order.component, number - order.count, order.leases):
            if worker.phase != "draining":
                self.watcher.removing(who, worker)
                worker.stop()

    def number(self, component: str) -> int:
        """Of its workers, without draining ones."""
        counts = self.counts()[component]
        return counts.starting + counts.ready

    def add(self, who: str, component: str) -> None:
        """Raises Refused."""
        if not self.counts()[component].devices_free:
            raise Refused(f"{component}: no device is free", elsewhere=False)
        self.watcher.adding(who, component)
        names = (f"{SLOTS[component]}-{number}" for number in itertools.count())
        self._world.open_slot(next(name for name in names if name not in self._world.slots))
        self.watcher.added(component)

    def to_end(self, component: str, number: int, leases: Sequence[int]) -> list[Slot]:
        """As the supervisor of `serve`."""
        workers = self.workers(component)
        found = [one for lease in leases for one in workers if one.lease_id == lease]
        found += [one for one in reversed(workers) if one.phase == "starting"]
        found += [one for one in reversed(workers) if one.phase == "ready" and not one.lease_id]
        if len(found) < number:
            raise Refused(f"{component}: no process is starting", elsewhere=False)
        return found[: max(number, 0)]

    def _connection(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request."""
        carry_out = partial(self.carry_out, writer.get_extra_info("peername")[0])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            request = _decode_request(await reader.readuntil(b"\n"))
            writer.write(_encode(self.orders.answer(request, carry_out)) + b"\n")


def _counts(slots: Sequence[Slot], free: int) -> RoleCounts:
    phases = [one.phase for one in slots]
    return RoleCounts(
        starting=phases.count("starting"),
        ready=phases.count("ready"),
        draining=phases.count("draining"),
        devices_each=1,
        devices_free=free,
        leases=tuple(one.lease_id for one in slots if one.lease_id),
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
            for worker in self._supervisor.workers(component):
                worker.preferred = worker.preferred or worker.lease_id == victim.lease_id
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
        there = [one for one in self._supervisor.workers(component) if one.phase != "draining"]
        worker = min(there, key=lambda one: (one.phase == "ready", not one.preferred, -one.began))
        self._supervisor.watcher.removing(self._who, worker)
        worker.stop()

    def owns(self, worker: EndpointRecord) -> bool:
        return True

    async def _way(self) -> None:
        """Raises Unavailable."""
        if self._network.is_cut(self._who, "supervisor"):
            await asyncio.sleep(1.0)
            raise Unavailable("the API server does not answer")
        await asyncio.sleep(self._network.delay_s())
