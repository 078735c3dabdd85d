"""Processes and servers of a simulated cluster, which are kept running, and the faults in them.

A component and its engine are two processes: the engine dies with its component,
as by a parent-death signal, and may be stopped or killed apart from it.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.runtime.process.component import Host
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.loop.process import SimProcess, SimState
from tests.simulation.network.network import Weather
from tests.simulation.scenario import Fault, FaultKind
from tests.simulation.servers.etcd import EtcdServer
from tests.simulation.servers.etcd_data import EtcdData
from tests.simulation.servers.nats_server import NatsServer

if TYPE_CHECKING:
    from tests.simulation.world import World


#: Of every simulated graph.
NAMESPACE = "sim"
#: Longer than any drain.
_DRAIN_S = 60.0
#: After this time an operator starts an instance again that has left in order.
_OPERATOR_S = 1.0
_BACKOFF = Backoff(first_s=0.5, longest_s=4.0)

#: How often a dead process's lease is not revoked, as if its supervisor had died with it.
_NOT_REVOKED = 0.3
#: A revocation takes between 1 ms and the product's timeout, as powers of ten.
_REVOKED_AFTER_S = (-3.0, 0.3)


#: By the beginning of their slots' names.
COMPONENTS = {
    "client": "Frontend",
    "decode": "VllmWorker",
    "prefill": "PrefillWorker",
    "planner": "Planner",
}


class Slot:
    """One supervised process and its engine.

    alone: it was added to a running graph, and is not started again when it ends before it was
    ready.
    """

    keeper: asyncio.Task[None]

    def __init__(self, world: "World", name: str, *, alone: bool = False):
        self.name = name
        self.component = COMPONENTS[name.partition("-")[0]]
        #: When it was made.
        self.began = world.loop.time()
        #: Written by the world.
        self.was_ready = False
        self.process: SimProcess | None = None
        self.engine: SimProcess | None = None
        #: What the component got; None until it is connected.
        self.host: Host | None = None
        #: Kubernetes ends it before others.
        self.preferred = False
        self._world, self._loop, self._judge = world, world.loop, world.judge
        #: Of the last component that was connected; 0 until it is, and after its end.
        self._last_lease = 0
        self._stopping, self._alone = False, alone
        self._wake = asyncio.Event()

    def start(self) -> None:
        """In the context of no process, also if a planner's call starts it."""
        self.keeper = self._loop.create_task(
            self.keep(), name=f"keep {self.name}", context=contextvars.Context()
        )

    def processes(self) -> list[SimProcess]:
        """Those that are alive."""
        return [p for p in (self.process, self.engine) if p is not None and not p.dead]

    @property
    def lease_id(self) -> int:
        """Of its process while that is ready; else 0."""
        host = self.host if self.name in self._world.ready else None
        return 0 if host is None else host.lease.id

    @property
    def phase(self) -> Literal["starting", "ready", "draining"]:
        if self._stopping:
            return "draining"
        return "ready" if self.was_ready else "starting"

    async def keep(self) -> None:
        """Runs until `stop`; a process that ends before is started again. The slot leaves the world
        at the end."""
        failures = 0
        while not self._stopping:
            began = self._loop.time()
            code = await self._run_once()
            self._judge.counts[f"exit {'killed' if code is None else code}"] += 1
            if code != 0 and self._last_lease:
                await self._revoke(self._last_lease)
            if self._stopping or (self._alone and not self.was_ready):
                break
            delay_s = _OPERATOR_S
            if code != 0:
                failures, delay_s = _BACKOFF.after_exit(failures, self._loop.time() - began)
            self._loop.trace.add(f"{self.name} ended with {code}; again in {delay_s:g} s")
            await self._pause(delay_s)
        del self._world.slots[self.name]

    def stop(self) -> None:
        """Drains it; it is not started again, and killed after some time."""
        self._stopping = True
        self._wake.set()
        self.terminate()
        self._loop.call_later(_DRAIN_S, self.kill, context=contextvars.Context())

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()

    def terminate(self) -> None:
        """SIGTERM."""
        if self.host is not None and self.process is not None and self.process.running:
            self.process.run(self.host.stop, "SIGTERM")
        elif self.process is not None:
            self.process.kill()

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()

    async def _revoke(self, lease_id: int) -> None:
        """As `revoke_lease` of the product, after a random time, and not always."""
        rng = self._world.supervisors_rng
        if rng.random() < _NOT_REVOKED:
            return
        await asyncio.sleep(10 ** rng.uniform(*_REVOKED_AFTER_S))
        etcd = self._world.etcd
        if etcd.process.running and not self._world.network.is_cut(self.name, "etcd"):
            if etcd.revoke(lease_id):
                self._loop.trace.add(f"{self.name}: its supervisor has revoked lease {lease_id:x}")
                self._judge.counts["leases revoked by supervisors"] += 1

    async def _run_once(self) -> int | None:
        """Its exit code; None when it was killed."""
        self.host = None
        self.process = process = self._loop.add_process(self.name)
        ended = asyncio.Event()

        def died(_: SimProcess, state: SimState) -> None:
            if state is SimState.DEAD:
                self._end_engine()
                ended.set()

        process.watchers.append(died)
        task = process.spawn(self._world.run(self), name=f"main {self.name}")
        task.add_done_callback(lambda _: ended.set())
        await ended.wait()
        self._last_lease = 0 if self.host is None else self.host.lease.id
        self.host = None
        if not task.done():
            return None
        if left := process.exit():
            self._judge.violate(f"{process} left tasks behind: {left}")
        if task.cancelled() or task.exception() is not None:
            self._judge.violate(f"{process} ended with {task!r}")
            return 1
        return task.result()

    # The engine's process

    def start_engine(
        self, engine: SimEngineProcess, main: Coroutine[Any, Any, None], on_end: Callable[[], None]
    ) -> SimProcess:
        self._end_engine()
        process = self.engine = self._loop.add_process(f"{self.name}.engine", host=self.name)
        self._judge.engine_started(engine)

        def died(_: SimProcess, state: SimState) -> None:
            if state is SimState.DEAD:
                engine.mover.die()
                self._judge.engine_died(engine)
                on_end()

        def ended(task: asyncio.Task[None]) -> None:
            if process.dead:
                return
            if not task.cancelled() and (exc := task.exception()) is not None:
                # An engine that cannot start ends, and so does its component, which is restarted.
                if engine.ready or not isinstance(exc, DynamoLiteError):
                    self._judge.violate(f"{process} failed: {exc!r}")
            elif left := process.exit():
                self._judge.violate(f"{process} left tasks behind: {left}")
            process.kill()

        process.watchers.append(died)
        process.spawn(main, name=f"main {process.name}").add_done_callback(ended)
        return process

    def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.kill()


#: Shortest time for which a killed server is down.
_SERVER_RESTART_S = 0.3


class FaultInjector:
    """In the slots and servers of a world."""

    def __init__(self, world: "World"):
        self._world, self._network = world, world.network
        #: Pauses that have ended: the name of the slot or server, start and end.
        self._paused: list[tuple[str, float, float]] = []

    async def inject(self, fault: Fault) -> None:
        """Returns when the fault is over."""
        self._network.loop.trace.add(f"FAULT {fault}", "world")
        match fault.kind:
            case FaultKind.CRASH | FaultKind.ENGINE_CRASH | FaultKind.DRAIN | FaultKind.REVOKE:
                self._end(fault)
            case FaultKind.PAUSE | FaultKind.COMPONENT_PAUSE | FaultKind.ENGINE_PAUSE:
                await self._pause(fault.target, self._paused_by(fault), fault.for_s)
            case FaultKind.BROKER_PAUSE:
                await self._pause("nats", [self._world.nats.process], fault.for_s)
            case FaultKind.STORE_PAUSE:
                await self._pause("etcd", [self._world.etcd.process], fault.for_s)
            case FaultKind.ISOLATE | FaultKind.CUT:
                await self._partition(fault)
            case FaultKind.WEATHER:
                await self._worsen_weather(fault)
            case FaultKind.WALL_JUMP:
                self._network.loop.jump_wall(fault.target, fault.amount)
            case FaultKind.BROKER_CRASH | FaultKind.STORE_CRASH | FaultKind.STORE_WIPE:
                await self._restart(fault)

    def held_up_s(self, name: str, begin: float, end: float) -> float:
        """Seconds for which `name` was stopped between two times."""
        return sum(
            max(0.0, min(end, until) - max(begin, since))
            for who, since, until in self._paused
            if who == name
        )

    def _end(self, fault: Fault) -> None:
        slot = self._world.slots.get(fault.target)
        if slot is None:
            return
        if fault.kind is FaultKind.ENGINE_CRASH:
            if slot.engine is not None:
                slot.engine.kill()
        elif fault.kind is FaultKind.CRASH:
            if slot.process is not None:
                slot.process.kill()
        elif fault.kind is FaultKind.DRAIN:
            slot.terminate()
        elif slot.host is not None:
            self._world.etcd.revoke(slot.host.lease.id)

    def _paused_by(self, fault: Fault) -> list[SimProcess]:
        slot = self._world.slots.get(fault.target)
        if slot is None:
            return []
        if fault.kind is FaultKind.PAUSE:
            return slot.processes()
        half = slot.engine if fault.kind is FaultKind.ENGINE_PAUSE else slot.process
        return [half] if half is not None and not half.dead else []

    async def _pause(self, name: str, processes: list[SimProcess], for_s: float) -> None:
        began = self._network.loop.time()
        for process in processes:
            process.pause()
        await asyncio.sleep(for_s)
        for process in processes:
            process.resume()
        self._paused.append((name, began, self._network.loop.time()))

    async def _partition(self, fault: Fault) -> None:
        self._network.cut(fault.target, fault.other)
        await asyncio.sleep(fault.for_s)
        self._network.heal(fault.target, fault.other)

    async def _worsen_weather(self, fault: Fault) -> None:
        bad = fault.amount
        self._network.weather = Weather(
            delay_s=0.0005, spread_s=bad, loss=bad / 2, duplicate=bad / 2, reorder=bad
        )
        await asyncio.sleep(fault.for_s)
        self._network.weather = Weather()

    async def _restart(self, fault: Fault) -> None:
        broker = fault.kind is FaultKind.BROKER_CRASH
        server = self._world.nats if broker else self._world.etcd
        server.process.kill()
        await asyncio.sleep(max(fault.for_s, _SERVER_RESTART_S))
        if server.process.dead:
            server.start(wiped=fault.kind is FaultKind.STORE_WIPE)


#: How often a wiped etcd has the same cluster id as before, and how often an etcd that is
#: restarted with its data has compacted its history.
_SAME_CLUSTER, _COMPACTED = 0.7, 0.3


class Nats:
    """The world's broker. Its queues are in memory, and are lost with its process."""

    def __init__(self, world: "World"):
        self._world = world
        self.start()

    def start(self, *, wiped: bool = True) -> None:
        self.process = self._world.loop.add_process("nats")
        self.server = NatsServer(self._world.network, self.process)

    def jobs(self) -> list[bytes]:
        """Those on the prefill queue, waiting or pulled."""
        return self.server.jetstream.payloads(names.prefill_stream(NAMESPACE))


class Etcd:
    """The world's store. What it holds is on a disk."""

    def __init__(self, world: "World"):
        self._world = world
        self._random = world.loop.stream("etcd").random
        self.data = EtcdData()
        #: Leases that the faults have revoked, or that their owners must take for revoked.
        self.revoked: set[int] = set()
        self.start()

    def start(self, *, wiped: bool = False) -> None:
        self.process = self._world.loop.add_process("etcd")
        if wiped:
            leases = self.data.leases.items()
            self.revoked |= {i for i, lease in leases if lease.unmarked and not lease.keys}
            self.data = self.data.wiped(same_cluster=self._random() < _SAME_CLUSTER)
            if self._world.planning is not None:
                self._world.planning.judge.wiped()
        elif self._random() < _COMPACTED:
            self.data.compact(self.data.revision)
        self.server = EtcdServer(
            self._world.network,
            self.process,
            self.data,
            on_expiry=self._world.lease_expired,
            slowest_answer_s=self._world.scenario.slowest_store_answer_s,
        )

    def revoke(self, lease_id: int) -> bool:
        """Returns whether there was such a lease."""
        found = not self.process.dead and self.server.revoke(lease_id)
        if found:
            self.revoked.add(lease_id)
        return found
