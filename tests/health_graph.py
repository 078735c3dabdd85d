"""Members in a store of their own, their heartbeats, and a monitor that judges them."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

from prometheus_client import CollectorRegistry

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.health import Heartbeat
from dynamo_lite.protocol.names import endpoint_key, endpoint_prefix, health_subject
from dynamo_lite.runtime.members.health import HealthMonitor, publish_heartbeats
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from tests.builders import endpoint_record, eventually, members_when, register
from tests.twins.servers import MemoryStore

A, B = 0xA, 0xB


class Graph:
    """A roster in a store of its own, and a monitor of its members."""

    def __init__(self, messaging: Messaging):
        self.messaging, self.namespace = messaging, f"t-{secrets.token_hex(3)}"
        self.store, self.registry = MemoryStore(), CollectorRegistry()
        self.drops: list[str] = []
        self.turned: asyncio.Queue[tuple[set[int], set[int]]] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        prefix = endpoint_prefix(self.namespace, "Worker", "generate")
        async with (
            Roster(self.store, prefix) as self.roster,
            HealthMonitor(
                self.messaging,
                self.roster,
                namespace=self.namespace,
                component="Worker",
                registry=self.registry,
                on_drop=self.drops.append,
            ) as self.monitor,
        ):
            self.monitor.on_change(
                lambda back, lost: self.turned.put_nowait((set(back), set(lost)))
            )
            yield self

    async def join(self, lease_id: int) -> None:
        await register(self.store, endpoint_record(lease_id, "Worker", namespace=self.namespace))
        await members_when(self.roster, lambda ms: any(m.lease_id == lease_id for m in ms), 5)

    async def leave(self, lease_id: int) -> None:
        await self.store.delete(endpoint_key(self.namespace, "Worker", "generate", lease_id))
        await members_when(self.roster, lambda ms: all(m.lease_id != lease_id for m in ms), 5)

    def worker(
        self, lease_id: int, verdict: Callable[[], tuple[bool, str]] = lambda: (True, "")
    ) -> Coroutine[Any, Any, None]:
        return publish_heartbeats(
            self.messaging,
            namespace=self.namespace,
            component="Worker",
            lease_id=lease_id,
            verdict=verdict,
        )

    @contextlib.asynccontextmanager
    async def beating(self, lease_id: int) -> AsyncIterator[None]:
        task = asyncio.create_task(self.worker(lease_id))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def beat(self, lease_id: int, number: int, *, ok: bool = True) -> None:
        beat = Heartbeat(lease_id=lease_id, number=number, ok=ok, detail="stuck")
        await self.send(encode(beat))

    async def send(self, payload: bytes) -> None:
        await self.messaging.publish(health_subject(self.namespace, "Worker"), payload)

    async def hear(self, beats: int) -> None:
        """Returns when this many more heartbeats have come, of any worker."""
        heard = asyncio.Semaphore(0)

        async def on_beat(_payload: bytes) -> None:
            heard.release()

        subject = health_subject(self.namespace, "Worker")
        async with asyncio.timeout(10), self.messaging.serve(subject, on_beat):
            for _ in range(beats):
                await heard.acquire()

    async def next_turn(self) -> tuple[set[int], set[int]]:
        async with asyncio.timeout(5):
            return await self.turned.get()

    async def dropped(self, count: int) -> None:
        """Returns when so many malformed ones are counted: those sent before have come, too."""
        await eventually(lambda: self.drops == count * ["beat"], 5)

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    def responsive(self) -> list[int]:
        return [member.lease_id for member in self.monitor.responsive]
