"""Whether a Frontend can send requests, with and without a broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.protocol.names import endpoint_prefix, health_subject
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.members.health import SILENT_S, HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.serve.services.frontend.dispatcher import WorkerCheck, check_workers
from tests.builders import endpoint_record, register
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.unit.virtual import virtual

A, B = 0xA, 0xB


class Scene:
    """connected: lease ids of the workers with an open TCP connection."""

    def __init__(self) -> None:
        self.store, self.messaging = MemoryStore(), MemoryMessaging()
        self.connected: set[int] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Scene"]:
        async with (
            self.messaging,
            Roster(self.store, endpoint_prefix("t", "W", "generate")) as self.roster,
            HealthMonitor(self.messaging, self.roster, namespace="t", component="W") as self.health,
        ):
            yield self

    def is_connected(self, member: EndpointRecord) -> bool:
        return member.lease_id in self.connected

    async def join(self, *lease_ids: int) -> None:
        for lease_id in lease_ids:
            await register(self.store, endpoint_record(lease_id, "W"))
        self.connected.update(lease_ids)
        await asyncio.sleep(0)

    async def says_that_it_is_stuck(self, lease_id: int) -> None:
        heartbeat = Heartbeat(lease_id=lease_id, number=0, ok=False, detail="stuck")
        await self.messaging.publish(health_subject("t", "W"), encode(heartbeat))
        await asyncio.sleep(0)

    def check(self) -> WorkerCheck:
        return check_workers(self.roster, self.health, self)  # type: ignore[arg-type]


async def silence() -> None:
    await asyncio.sleep(SILENT_S + 0.3)


@virtual
async def test_with_the_broker_heartbeats_decide():
    async with Scene().open() as scene:
        assert "no decode worker is registered" in scene.check().trouble
        await scene.join(A, B)
        scene.connected.clear()
        assert scene.check() == WorkerCheck()
        scene.connected = {A, B}
        await silence()
        check = scene.check()
        assert "none of 2 decode workers is responsive" in check.trouble
        assert not check.without_broker


@virtual
async def test_without_the_broker_open_connections_decide():
    async with Scene().open() as scene:
        await scene.join(A, B)
        scene.messaging.set_connected(False)
        await silence()
        assert not scene.check().trouble
        assert "2 of 2 decode workers are connected by TCP" in scene.check().without_broker
        scene.connected = {B}
        assert "1 of 2 decode workers" in scene.check().without_broker
        scene.connected = set()
        assert "none of 2 decode workers is connected" in scene.check().trouble
        assert not scene.check().without_broker


@virtual
async def test_a_frozen_broker_that_is_noticed_after_the_heartbeats_were_missed():
    async with Scene().open() as scene:
        await scene.join(A)
        await silence()
        assert "responsive" in scene.check().trouble
        scene.messaging.set_connected(False)
        assert not scene.check().trouble and scene.check().without_broker


@virtual
async def test_a_worker_that_is_known_to_be_stuck_does_not_count():
    async with Scene().open() as scene:
        await scene.join(A)
        await scene.says_that_it_is_stuck(A)
        assert "responsive" in scene.check().trouble
        scene.messaging.set_connected(False)
        assert "none of 1 decode workers is connected" in scene.check().trouble
        await scene.join(B)
        assert "1 of 2 decode workers" in scene.check().without_broker
