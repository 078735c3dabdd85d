"""Injects a scenario's faults, and ends them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.loop.process import SimProcess
from tests.simulation.network.network import Network, Weather
from tests.simulation.scenario import Fault, FaultKind
from tests.simulation.supervisor import Slot

#: Shortest time for which a killed server is down.
_SERVER_RESTART_S = 0.3


class KillableServer(Protocol):
    """A server of the cluster that can be killed and started again."""

    @property
    def process(self) -> SimProcess: ...

    def start(self, *, wiped: bool = False) -> None: ...


@dataclass
class FaultInjector:
    """slots: by name. revoke: revokes a lease, as an operator does."""

    network: Network
    slots: dict[str, Slot]
    servers: dict[str, KillableServer]
    revoke: Callable[[int], bool]
    #: Pauses that have ended: the name of the slot or server, start and end.
    paused: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    _pauses: Counter[SimProcess] = field(default_factory=Counter[SimProcess])
    _partitions: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    async def inject(self, fault: Fault) -> None:
        """Returns when the fault is over."""
        self.network.loop.trace.add(f"FAULT {fault}", "world")
        match fault.kind:
            case FaultKind.CRASH | FaultKind.ENGINE_CRASH | FaultKind.DRAIN | FaultKind.REVOKE:
                self._end(fault)
            case FaultKind.PAUSE | FaultKind.COMPONENT_PAUSE | FaultKind.ENGINE_PAUSE:
                await self._pause(fault.target, self._paused_by(fault), fault.for_s)
            case FaultKind.BROKER_PAUSE:
                await self._pause("nats", [self.servers["nats"].process], fault.for_s)
            case FaultKind.STORE_PAUSE:
                await self._pause("etcd", [self.servers["etcd"].process], fault.for_s)
            case FaultKind.ISOLATE | FaultKind.CUT:
                await self._partition(fault)
            case FaultKind.WEATHER:
                await self._worsen_weather(fault)
            case FaultKind.WALL_JUMP:
                self.network.loop.jump_wall(fault.target, fault.amount)
            case FaultKind.BROKER_CRASH | FaultKind.STORE_CRASH | FaultKind.STORE_WIPE:
                await self._restart(fault)

    def held_up_s(self, name: str, begin: float, end: float) -> float:
        """Seconds for which `name` was stopped between two times."""
        return sum(
            max(0.0, min(end, until) - max(begin, since))
            for who, since, until in self.paused
            if who == name
        )

    def _end(self, fault: Fault) -> None:
        slot = self.slots.get(fault.target)
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
            self.revoke(slot.host.lease.id)

    def _paused_by(self, fault: Fault) -> list[SimProcess]:
        slot = self.slots.get(fault.target)
        if slot is None:
            return []
        if fault.kind is FaultKind.PAUSE:
            return slot.processes()
        half = slot.engine if fault.kind is FaultKind.ENGINE_PAUSE else slot.process
        return [half] if half is not None and not half.dead else []

    async def _pause(self, name: str, processes: list[SimProcess], for_s: float) -> None:
        """Pauses may overlap: a process resumes at the end of the last one."""
        began = self.network.loop.time()
        for process in processes:
            self._pauses[process] += 1
            process.pause()
        await asyncio.sleep(for_s)
        for process in processes:
            self._pauses[process] -= 1
            if not self._pauses[process]:
                process.resume()
        self.paused.append((name, began, self.network.loop.time()))

    async def _partition(self, fault: Fault) -> None:
        """Partitions may overlap: hosts are reconnected at the end of the last one."""
        network, here, there = self.network, fault.target, fault.other
        count = self._partitions
        count[here, there] += 1
        if count[here, there] == 1:
            network.cut(here, there) if there else network.isolate(here)
        await asyncio.sleep(fault.for_s)
        count[here, there] -= 1
        if not count[here, there]:
            network.heal(here, there) if there else network.rejoin(here)

    async def _worsen_weather(self, fault: Fault) -> None:
        bad = fault.amount
        self.network.weather = Weather(
            delay_s=0.0005, spread_s=bad, loss=bad / 2, duplicate=bad / 2, reorder=bad
        )
        await asyncio.sleep(fault.for_s)
        self.network.weather = Weather()

    async def _restart(self, fault: Fault) -> None:
        name = "nats" if fault.kind is FaultKind.BROKER_CRASH else "etcd"
        server = self.servers[name]
        server.process.kill()
        await asyncio.sleep(max(fault.for_s, _SERVER_RESTART_S))
        if server.process.dead:
            server.start(wiped=fault.kind is FaultKind.STORE_WIPE)
