"""The supervisor of a simulated graph: it adds and removes workers as the one of `serve` does, or
as Kubernetes does, which decides by itself which worker ends."""

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from dynamo_lite.protocol.errors import Refused, UnknownWorker
from dynamo_lite.protocol.planner import (
    SUPERVISOR_SOCKET,
    Add,
    Remove,
    RoleCounts,
    SupervisorOrder,
    SupervisorRequest,
)
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.serve.supervisor_socket import Orders
from tests.simulation.network.network import Network
from tests.simulation.supervisor import Slot

#: Of the graph; there is no such folder.
STATE_DIR = "/sim"
#: Component to the beginning of its slots' names.
SLOTS = {"VllmWorker": "decode", "PrefillWorker": "prefill"}
#: Longer than any drain: then it is killed.
_DRAIN_S = 60.0

_decode_request = msgspec.json.Decoder(SupervisorRequest).decode
_encode = msgspec.json.Encoder().encode


class Worker:
    """A worker that the supervisor keeps running. began: when it was started for the first time."""

    def __init__(self, component: str, slot: Slot, lease_of: Callable[[str], int], began: float):
        self.component, self.slot, self._lease_of = component, slot, lease_of
        self.began = began
        self.retired = False
        self.ended = False
        #: Its lease when it was retired, or told to leave.
        self.last_lease = 0

    @property
    def lease_id(self) -> int:
        return self._lease_of(self.slot.name)

    @property
    def phase(self) -> Literal["starting", "ready", "draining", "ended"]:
        if self.ended:
            return "ended"
        if self.retired:
            return "draining"
        return "ready" if self.slot.was_ready else "starting"


class Watcher(Protocol):
    """Sees each order before and after it is carried out. who: the name of its sender."""

    def adding(self, who: str, component: str) -> None: ...

    def added(self, who: str, component: str) -> None: ...

    def removing(self, who: str, worker: Worker) -> None: ...

    def killing(self, who: str, worker: Worker) -> None: ...


class Cluster(Protocol):
    """Where the workers run."""

    def open_slot(self, name: str) -> Slot:
        """Adds it to the running graph, and starts its process, in the context of no process."""
        ...

    def keeper_of(self, name: str) -> asyncio.Task[None]:
        """Ends when the slot's process has ended for good."""
        ...

    def close_slot(self, name: str) -> None: ...

    def lease_of(self, name: str) -> int:
        """Of the slot's process while it is ready; else 0."""
        ...


class SimSupervisor:
    """devices: of the host; each worker has one. Orders have versions, as those of `serve`.
    now: seconds of virtual time."""

    def __init__(self, cluster: Cluster, devices: int, now: Callable[[], float]):
        self._cluster, self._devices, self._now = cluster, devices, now
        self._workers: dict[str, list[Worker]] = {name: [] for name in SLOTS}
        self._tasks = OwnedTasks()
        self.orders = Orders(self.counts)
        self.watcher: Watcher | None = None

    def listen(self, network: Network) -> None:
        """At the socket that the shipped clients open."""
        process = network.loop.add_process("supervisor")
        server = process.run(network.create_server, lambda: _Connection(self), "supervisor", 1)
        path = f"{STATE_DIR}/{SUPERVISOR_SOCKET}"
        network.unix_sockets[path] = server.sockets[0].getsockname()[1]

    def keep(self, component: str, slot: Slot) -> None:
        worker = Worker(component, slot, self._cluster.lease_of, self._now())
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
            )
        return found

    def carry_out(self, who: str, order: SupervisorOrder) -> None:
        """Raises Refused."""
        match order:
            case Add():
                self.add(who, order.component)
            case Remove():
                self._retire(who, order)

    def add(self, who: str, component: str) -> None:
        """Raises Refused."""
        if not self.counts()[component].devices_free:
            raise Refused(f"{component}: no device is free", elsewhere=False)
        if self.watcher is not None:
            self.watcher.adding(who, component)
        self._start(component)
        if self.watcher is not None:
            self.watcher.added(who, component)

    def _start(self, component: str) -> None:
        workers = self._workers[component]
        taken = {one.slot.name for one in workers if not one.ended}
        kind = SLOTS[component]
        name = next(f"{kind}-{i}" for i in range(1000) if f"{kind}-{i}" not in taken)
        workers[:] = [one for one in workers if one.slot.name != name]
        self.keep(component, self._cluster.open_slot(name))

    def find(self, component: str, lease_id: int) -> Worker:
        """Raises Refused. lease_id: 0 for one that has crashed, or was never ready."""
        workers = self._workers[component]
        if lease_id:
            for one in workers:
                if lease_id in (one.lease_id, one.last_lease):
                    return one
            raise UnknownWorker(f"{component}: no process has lease {lease_id:x}")
        crashed = [one for one in workers if one.phase == "ready" and not one.lease_id]
        starting = [one for one in workers if one.phase == "starting"]
        if not (found := crashed or starting):
            raise Refused(f"{component}: no process is starting", elsewhere=False)
        return found[-1]

    def _retire(self, who: str, order: Remove) -> None:
        worker = self.find(order.component, order.lease_id)
        if worker.phase in ("starting", "ready"):
            if self.watcher is not None:
                self.watcher.removing(who, worker)
            self.end(worker)

    def end(self, worker: Worker) -> None:
        """Drains it; it is not started again."""
        worker.last_lease = worker.lease_id
        worker.retired = True
        worker.slot.stop()

    def kill(self, who: str, worker: Worker) -> None:
        """Kills the worker at once."""
        if self.watcher is not None:
            self.watcher.killing(who, worker)
        worker.retired = True
        worker.slot.kill()

    async def _until_ended(self, worker: Worker) -> None:
        name = worker.slot.name
        keeper = self._cluster.keeper_of(name)
        while not keeper.done():
            await asyncio.wait([keeper], timeout=_DRAIN_S)
            if worker.retired and not keeper.done():
                worker.slot.kill()
                await asyncio.wait([keeper])
        worker.ended = True
        self._cluster.close_slot(name)


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
            reply = self._supervisor.orders.answer(request, self._carry_out)
            self._transport.write(_encode(reply) + b"\n")

    def _carry_out(self, order: SupervisorOrder) -> None:
        self._supervisor.carry_out(self._who, order)
