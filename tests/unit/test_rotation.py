"""When the requests of an unresponsive worker move, and whether a Frontend can send requests, with
and without a broker; in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Self

from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.rotation import WorkerCheck, candidates, check_workers, rotate
from dynamo_lite.runtime.members.health import SILENT_S
from dynamo_lite.runtime.members.roster import Members
from tests.builders import loop_time
from tests.health_graph import A, B, Graph
from tests.twins.servers import MemoryMessaging
from tests.unit.virtual import virtual


class Transport:
    def __init__(self) -> None:
        self.dropped: list[tuple[int, str, float]] = []
        self.kept: list[int] = []

    def drop(self, member: EndpointRecord, why: str) -> None:
        self.kept.remove(member.lease_id)
        self.dropped.append((member.lease_id, why, loop_time()))

    def is_connected(self, member: EndpointRecord) -> bool:
        return member.lease_id in self.kept

    def retain(self, members) -> None:
        self.kept = [member.lease_id for member in members]


class Frontend(Graph):
    """What one sees of two workers."""

    def __init__(self) -> None:
        self.memory = MemoryMessaging()
        super().__init__(self.memory)
        self.transport, self.changes = Transport(), 0
        self.picks: list[int] = []
        self.beats: dict[int, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        async with super().open(), contextlib.AsyncExitStack() as stack:
            await rotate(stack, self.roster, self.monitor, self.transport, self._changed)  # type: ignore[arg-type]
            for lease_id in (A, B):
                await self.join(lease_id)
                self.beats[lease_id] = asyncio.create_task(self.worker(lease_id))
            await asyncio.sleep(5)
            yield self
        for lease_id in self.beats:
            await self.stop(lease_id)

    def _changed(self, members: Members) -> None:
        self.changes += 1
        self.picks = [member.lease_id for member in members]

    async def stop(self, lease_id: int) -> float:
        task = self.beats[lease_id]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return loop_time()

    def picks_from(self) -> list[int]:
        members = candidates(self.roster, self.monitor)
        assert self.picks == [member.lease_id for member in members]
        return self.picks


@virtual
async def test_a_silent_worker_gets_nothing_new_then_loses_what_it_has():
    async with Frontend().open() as frontend:
        assert frontend.transport.kept == [A, B]
        changes, stopped = frontend.changes, await frontend.stop(A)
        await asyncio.sleep(4.5)
        assert frontend.picks_from() == [B] and frontend.changes == changes + 1
        await asyncio.sleep(4.0)
        assert frontend.transport.dropped == []
        await asyncio.sleep(2.0)
        [(lease_id, why, at)] = frontend.transport.dropped
        assert lease_id == A and why.startswith("no heartbeat for 10.")
        assert 9.0 <= at - stopped <= 10.5
        frontend.transport.retain(frontend.roster.members)  # as a request connects to it again
        await asyncio.sleep(0.5)
        assert [lease_id for lease_id, *_ in frontend.transport.dropped] == [A, A]


@virtual
async def test_a_worker_that_is_back_in_time_keeps_its_requests():
    async with Frontend().open() as frontend:
        await frontend.stop(A)
        await asyncio.sleep(8.0)
        for number in range(10, 40):
            await frontend.beat(A, number)
            await asyncio.sleep(1.0)
        assert frontend.transport.dropped == []
        assert frontend.picks_from() == [A, B]


@virtual
async def test_a_worker_that_says_that_it_is_stuck_loses_its_requests_too():
    async with Frontend().open() as frontend:
        stopped = await frontend.stop(A)
        for number in range(10, 25):
            await frontend.beat(A, number, ok=False)
            await asyncio.sleep(1.0)
        [(lease_id, why, at)] = frontend.transport.dropped
        assert (lease_id, why) == (A, "stuck")
        assert 9.0 <= at - stopped <= 10.5


@virtual
async def test_nothing_moves_where_no_worker_responds():
    """It moves when there is somewhere to go."""
    async with Frontend().open() as frontend:
        await frontend.stop(A)
        await frontend.stop(B)
        await asyncio.sleep(60.0)
        assert frontend.transport.dropped == []
        assert frontend.picks_from() == [A, B]
        await frontend.beat(B, 100)
        await asyncio.sleep(0.1)
        assert [lease_id for lease_id, *_ in frontend.transport.dropped] == [A]
        assert frontend.picks_from() == [B]


@virtual
async def test_an_outage_of_the_broker_moves_nothing():
    async with Frontend().open() as frontend:
        frontend.memory.set_connected(False)
        await asyncio.sleep(60.0)
        frontend.memory.set_connected(True)
        await asyncio.sleep(60.0)
        assert frontend.transport.dropped == []
        assert frontend.picks_from() == [A, B]


@virtual
async def test_a_worker_that_falls_silent_while_times_are_rounded_is_found():
    """Above 1024 a time has one bit less: what is added is not what was subtracted."""
    members, pauses = range(0x100, 0x100 + 40), random.Random(1)
    async with Frontend().open() as frontend:
        assert loop_time() < 1021
        await asyncio.sleep(1021 - loop_time())
        for lease_id in members:
            await asyncio.sleep(pauses.uniform(0.05, 0.09))
            await frontend.join(lease_id)
        await asyncio.sleep(5)
        assert all(frontend.monitor.trouble(lease_id) for lease_id in members)


# Whether it can send requests


def check(graph: Graph, *connected: int) -> WorkerCheck:
    """connected: lease ids of the workers with an open TCP connection."""
    transport = Transport()
    transport.kept = list(connected)
    return check_workers(graph.roster, graph.monitor, transport)  # type: ignore[arg-type]


async def silence() -> None:
    await asyncio.sleep(SILENT_S + 0.3)


@virtual
async def test_without_the_broker_open_connections_decide():
    """Of a broker that is frozen, heartbeats are missed before it is noticed."""
    broker = MemoryMessaging()
    async with Graph(broker).open() as graph:
        await graph.join(A)
        await graph.join(B)
        await silence()
        assert "responsive" in check(graph, A, B).trouble
        broker.set_connected(False)
        await silence()
        assert not check(graph, A, B).trouble
        assert "2 of 2 decode workers are connected by TCP" in check(graph, A, B).without_broker
        assert "1 of 2 decode workers" in check(graph, B).without_broker
        assert "none of 2 decode workers is connected" in check(graph).trouble
        assert not check(graph).without_broker


@virtual
async def test_a_worker_that_is_known_to_be_stuck_does_not_count():
    broker = MemoryMessaging()
    async with Graph(broker).open() as graph:
        await graph.join(A)
        await graph.beat(A, 0, ok=False)
        await asyncio.sleep(0)
        assert "responsive" in check(graph, A).trouble
        broker.set_connected(False)
        assert "none of 1 decode workers is connected" in check(graph, A).trouble
        await graph.join(B)
        assert "1 of 2 decode workers" in check(graph, A, B).without_broker
