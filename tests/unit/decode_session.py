"""A decode engine with its session open over the in-process twins, and prefill workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain
from dynamo_lite.runtime.members.health import publish_heartbeats
from dynamo_lite.runtime.tasks import running
from tests.builders import ENGINE, NAMESPACE, endpoint_record, loop_time, register
from tests.twins.queue import MemoryQueue
from tests.twins.servers import MemoryStore
from tests.unit.decode_engine import HELD, Decode, prompt

OTHER = 0xB


class LoopClock:
    """The loop's own time as the engine's."""

    @property
    def now(self) -> float:
        return loop_time()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1e9


class Twins:
    """The clients, as the engine opens it. The engine's jobs go to the queue that it opens."""

    def __init__(self, decode: Decode, store: MemoryStore):
        self._decode, self._store = decode, store

    @contextlib.asynccontextmanager
    async def messaging(self) -> AsyncIterator[Any]:
        yield self._decode.messaging

    @contextlib.asynccontextmanager
    async def store(self) -> AsyncIterator[Any]:
        yield self._store

    def queue(self, config: QueueConfig) -> MemoryQueue:
        broker = self._decode.broker
        self._decode.queue = queue = MemoryQueue(
            broker, stream="s", subject="s.jobs", config=config
        )
        return queue


class Scene:
    """The engine with its session open; prefill workers that are registered, and may beat."""

    def __init__(self) -> None:
        self.decode = Decode(LoopClock())  # type: ignore[arg-type]
        self.workers = self.decode.workers
        self.store = MemoryStore()
        self.decode.clients.servers = Twins(self.decode, self.store)
        self.verdicts: dict[int, tuple[bool, str]] = {}
        self.beats: dict[int, asyncio.Task[None]] = {}
        #: The attempts that each writer holds, and renews while it beats.
        self.held: dict[int, set[str]] = {}
        self.given_up: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def open(self, *writers: int) -> AsyncIterator["Scene"]:
        for writer in writers:
            await self.join(writer)
        net, attempts = self.decode.net, self.decode.attempts
        del attempts._start  # in a session it runs them itself
        net.workers = attempts._workers = self.workers
        async with net.session():
            steps = asyncio.create_task(self._step())
            await asyncio.sleep(2.0)
            try:
                yield self
            finally:
                steps.cancel()
                await self.decode.network()
                for writer in list(self.beats):
                    await self.hush(writer)
                await asyncio.gather(steps, return_exceptions=True)

    async def _step(self) -> None:
        """The engine's own loop."""
        while True:
            for attempt, request_id in self.decode.half.build_step().give_up:
                self.given_up[attempt] = request_id
            await self.decode.network()
            await asyncio.sleep(0.01)

    async def explain(self, **wanted: Any) -> bytes:
        """The engine's reply to `explain`."""
        subject = names.explain_subject(NAMESPACE, ENGINE)
        question = encode(Explain(**wanted))
        return await self.decode.messaging.request(subject, question, timeout_s=1.0)

    def counted(self, outcome: str) -> float:
        return self.decode.counted(f"remote/{outcome}")

    async def join(self, writer: int) -> None:
        await register(self.store, endpoint_record(writer, "PrefillWorker", "prefill"))
        self.verdicts[writer] = True, ""
        beat = publish_heartbeats(
            self.decode.messaging,
            namespace=NAMESPACE,
            component="PrefillWorker",
            lease_id=writer,
            verdict=lambda: self.verdicts[writer],
        )
        self.beats[writer] = asyncio.create_task(self._live(writer, beat))

    async def _live(self, writer: int, beat: Coroutine[Any, Any, None]) -> None:
        async with running(beat, name="beat"):
            while True:
                await asyncio.sleep(HELD.for_s / 3)
                for attempt in list(self.held.get(writer, ())):
                    if await self.decode.claim(attempt, writer) != HELD:
                        self.held[writer].discard(attempt)

    async def leave(self, writer: int) -> None:
        key = names.endpoint_key(NAMESPACE, "PrefillWorker", "prefill", writer)
        await self.store.delete(key)

    async def hush(self, writer: int) -> None:
        beat = self.beats.pop(writer)
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)

    async def ask(self, request_id: str, *, claimed_by: int | None = None) -> str:
        assert self.decode.admit(prompt(request_id, 10)) > 0
        attempt = self.decode.attempt_of(request_id)
        await asyncio.sleep(0.1)
        if claimed_by is not None:
            assert await self.decode.claim(attempt, claimed_by) == HELD
            self.held.setdefault(claimed_by, set()).add(attempt)
        return attempt

    async def given_up_within(self, seconds: float, *attempts: str) -> float:
        """Waits until the engine has given these attempts up. Returns after how long."""
        began = loop_time()
        while not set(attempts) <= set(self.given_up):
            await asyncio.sleep(0.01)
            assert loop_time() - began <= seconds, self.decode.ledger
        return loop_time() - began
