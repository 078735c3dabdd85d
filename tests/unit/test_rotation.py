"""When the requests of an unresponsive worker move; in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.protocol.names import endpoint_key, endpoint_prefix, health_subject
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.heartbeat import publish_heartbeats
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.serve.services.frontend.dispatcher import rotate
from tests.builders import endpoint_record, loop_time, register
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.unit.virtual import virtual

A, B = 0xA, 0xB


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


class Frontend:
    """What one sees of two workers."""

    def __init__(self) -> None:
        self.store, self.messaging = MemoryStore(), MemoryMessaging()
        self.transport, self.changes = Transport(), 0
        self.beats: dict[int, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Frontend"]:
        prefix = endpoint_prefix("t", "W", "generate")
        async with (
            Roster(self.store, prefix) as self.roster,
            HealthMonitor(self.messaging, self.roster, namespace="t", component="W") as self.health,
        ):
            async with contextlib.AsyncExitStack() as stack:
                await rotate(stack, self.roster, self.health, self.transport, self._changed)  # type: ignore[arg-type]
                for lease_id in (A, B):
                    await self.join(lease_id)
                    self.start(lease_id)
                await asyncio.sleep(5)
                yield self
            for task in self.beats.values():
                task.cancel()
            await asyncio.gather(*self.beats.values(), return_exceptions=True)

    def _changed(self) -> None:
        self.changes += 1

    async def join(self, lease_id: int) -> None:
        await register(self.store, endpoint_record(lease_id, "W", stream="h:1"))

    async def leave(self, lease_id: int) -> None:
        await self.store.delete(endpoint_key("t", "W", "generate", lease_id))

    def start(self, lease_id: int) -> None:
        beat = publish_heartbeats(
            self.messaging,
            namespace="t",
            component="W",
            lease_id=lease_id,
            verdict=lambda: (True, ""),
        )
        self.beats[lease_id] = asyncio.create_task(beat)

    async def stop(self, lease_id: int) -> float:
        task = self.beats[lease_id]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return loop_time()

    async def says(self, lease_id: int, number: int, *, ok: bool) -> None:
        beat = Heartbeat(lease_id=lease_id, number=number, ok=ok, detail="stuck")
        await self.messaging.publish(health_subject("t", "W"), encode(beat))

    def picks_from(self) -> list[int]:
        return [member.lease_id for member in self.health.members_or_all]


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
            await frontend.says(A, number, ok=True)
            await asyncio.sleep(1.0)
        assert frontend.transport.dropped == []
        assert frontend.picks_from() == [A, B]


@virtual
async def test_a_worker_that_says_that_it_is_stuck_loses_its_requests_too():
    async with Frontend().open() as frontend:
        stopped = await frontend.stop(A)
        for number in range(10, 25):
            await frontend.says(A, number, ok=False)
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
        await frontend.says(B, 100, ok=True)
        await asyncio.sleep(0.1)
        assert [lease_id for lease_id, *_ in frontend.transport.dropped] == [A]
        assert frontend.picks_from() == [B]


@virtual
async def test_a_worker_that_leaves_is_not_dropped():
    async with Frontend().open() as frontend:
        await frontend.stop(A)
        await asyncio.sleep(5.0)
        changes = frontend.changes
        await frontend.leave(A)
        await asyncio.sleep(60.0)
        assert frontend.transport.dropped == []
        assert frontend.transport.kept == [B]
        assert frontend.changes == changes + 1


@virtual
async def test_an_outage_of_the_broker_moves_nothing():
    async with Frontend().open() as frontend:
        frontend.messaging.set_connected(False)
        await asyncio.sleep(60.0)
        frontend.messaging.set_connected(True)
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
        assert all(frontend.health.trouble(lease_id) for lease_id in members)
