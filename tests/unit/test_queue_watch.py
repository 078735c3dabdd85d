"""The queue's depth is read by one engine for all, and by each engine that gets no readings."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.decode.queue_watch import QueueWatch
from dynamo_lite.disagg.queue.base import QueueDepth
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import BrokerUnavailable, DynamoLiteError, PushAmbiguous, QueueFull
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.queue import QueueReading
from tests.builders import NAMESPACE, loop_time
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.twins.servers import MemoryMessaging
from tests.unit.decode_engine import WRITER, prompt
from tests.unit.decode_session import Scene
from tests.unit.virtual import virtual

MAX_AGE_S = DisaggOptions().queue_view_max_age_s
PERIOD_S = 0.25


class CountedQueue(MemoryQueue):
    """broken: this user's connection is down, while the others' are up."""

    reads = 0
    broken = False

    async def depth(self) -> QueueDepth:
        if self.broken:
            raise BrokerUnavailable("broken here")
        self.reads += 1
        return await super().depth()


class Engine:
    """A queue view with its connections."""

    def __init__(self, number: int, cluster: "Cluster"):
        self.name, self._cluster = f"e{number:03}", cluster
        self.queue = CountedQueue(cluster.broker, stream="s", subject="s.jobs")
        config: Any = SimpleNamespace(engine_id=self.name, namespace=NAMESPACE)
        workers: Any = SimpleNamespace(usable=[1, 2], responsive=[1, 2, 3])
        live = LiveThresholds(DisaggOptions(queue_view_max_age_s=MAX_AGE_S))
        self.drops: list[str] = []
        self.watch = QueueWatch(config, workers, live, loop_time, self.drops.append)

    @contextlib.asynccontextmanager
    async def run(self, messaging: MemoryMessaging) -> AsyncIterator[None]:
        self._cluster.running[self.name] = self
        async with self.queue, self.watch.running(self.queue, messaging):
            try:
                yield
            finally:
                del self._cluster.running[self.name]

    @property
    def knows(self) -> bool:
        if self.watch.view is None:
            return False
        return self.age_s <= DisaggOptions().queue_view_max_age_s

    @property
    def age_s(self) -> float:
        assert self.watch.view is not None
        return loop_time() - self.watch.view.read_at


class Cluster:
    def __init__(self, engines: int):
        self.broker, self.messaging = MemoryBroker(), MemoryMessaging()
        self.running: dict[str, Engine] = {}
        self.engines = [Engine(number, self) for number in range(engines)]
        self._ends: dict[str, contextlib.AsyncExitStack] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Cluster"]:
        try:
            for engine in self.engines:
                await self.start(engine)
            await asyncio.sleep(2.0)
            yield self
        finally:
            for engine in list(self.running.values()):
                await self.stop(engine)

    async def start(self, engine: Engine, *, deaf: bool = False) -> None:
        stack = self._ends[engine.name] = contextlib.AsyncExitStack()
        messaging = MemoryMessaging() if deaf else self.messaging
        await stack.enter_async_context(engine.run(messaging))

    async def stop(self, engine: Engine) -> None:
        await self._ends.pop(engine.name).aclose()

    async def reads_in(self, seconds: float, of: Sequence[Engine] | None = None) -> int:
        def reads() -> int:
            return sum(engine.queue.reads for engine in of or self.engines)

        before = reads()
        await asyncio.sleep(seconds)
        return reads() - before

    async def readers_in(self, seconds: float) -> list[Engine]:
        before = {engine.name: engine.queue.reads for engine in self.engines}
        await asyncio.sleep(seconds)
        return [engine for engine in self.engines if engine.queue.reads > before[engine.name]]

    async def oldest_in(self, seconds: float) -> float:
        """The greatest age of any running engine's view in this time."""
        until, oldest = loop_time() + seconds, 0.0
        while loop_time() < until:
            await asyncio.sleep(0.01)
            oldest = max([oldest, *(engine.age_s for engine in self.running.values())])
        return oldest


@virtual
async def test_a_hundred_engines_ask_as_often_as_one():
    async with Cluster(100).open() as cluster:
        assert await cluster.reads_in(10.0) in (39, 40, 41)
        assert await cluster.oldest_in(3.0) < PERIOD_S + 0.05
        [reader] = await cluster.readers_in(3.0)
        await reader.queue.push(bytes(400), message_id="m")
        await asyncio.sleep(PERIOD_S + 0.05)
        for engine in cluster.engines:
            view = engine.watch.view
            assert view is not None and (view.jobs, view.tokens) == (1, 100)
            assert (view.prefill_workers, view.prefill_workers_alive) == (2, 3)


@virtual
async def test_when_the_reader_is_gone_another_one_reads():
    async with Cluster(50).open() as cluster:
        for _ in range(3):
            [reader] = await cluster.readers_in(1.0)
            await cluster.stop(reader)
            assert await cluster.oldest_in(3.0) < 1.0
            assert await cluster.reads_in(5.0) in (19, 20, 21)
        newcomer = Engine(50, cluster)
        cluster.engines.append(newcomer)
        await cluster.start(newcomer)
        await asyncio.sleep(1.0)
        assert len(await cluster.readers_in(5.0)) == 1


@virtual
async def test_of_two_the_other_one_waits_half_the_age_of_a_view_at_most():
    async with Cluster(2).open() as cluster:
        for _ in range(10):
            [reader] = await cluster.readers_in(1.0)
            await cluster.stop(reader)
            assert 0.4 < await cluster.oldest_in(3.0) < MAX_AGE_S / 2 + 0.05
            await cluster.start(reader)


@virtual
async def test_a_reader_that_hangs_delays_no_engine():
    async with Cluster(20).open() as cluster:
        [reader] = await cluster.readers_in(1.0)
        reader.queue.broken = True
        assert await cluster.oldest_in(5.0) < 1.0
        assert reader.knows, "it hears the others"
        [other] = await cluster.readers_in(1.0)
        assert other is not reader


@virtual
async def test_an_engine_without_readings_reads_by_itself():
    cluster = Cluster(0)
    deaf = [Engine(number, cluster) for number in range(30)]
    for engine in deaf:
        await cluster.start(engine, deaf=True)
    assert await cluster.oldest_in(10.0) < PERIOD_S + 0.05
    assert all(engine.knows for engine in deaf)
    for engine in deaf:
        await cluster.stop(engine)


@virtual
async def test_tokens_follow_from_the_size_of_what_was_pushed_here():
    async with Cluster(1).open() as cluster:
        [engine] = cluster.engines
        await engine.queue.push(bytes(3000), message_id="m")

        async def tokens() -> int:
            await asyncio.sleep(PERIOD_S + 0.05)
            assert engine.watch.view is not None
            return engine.watch.view.tokens

        assert await tokens() == 750, "four bytes for each"
        for _ in range(50):
            engine.watch.pushed(1000, 2000)
        assert abs(await tokens() - 1500) < 10
        for _ in range(50):  # most of these prompts are in the engine's cache
            engine.watch.pushed(100, 2000)
        assert abs(await tokens() - 150) < 10


@virtual
async def test_without_the_broker_the_queue_is_unknown_to_all():
    async with Cluster(10).open() as cluster:
        cluster.broker.set_connected(False)
        await asyncio.sleep(MAX_AGE_S + PERIOD_S + 0.05)
        assert not any(engine.knows for engine in cluster.engines)
        cluster.broker.set_connected(True)
        await asyncio.sleep(MAX_AGE_S / 2)
        assert all(engine.knows for engine in cluster.engines)


@virtual
async def test_who_cannot_push_believes_only_what_it_has_read_itself():
    """Otherwise it would keep asking for remote prefills that it cannot queue."""
    async with Cluster(5).open() as cluster:
        cut_off = cluster.engines[3]
        cut_off.queue.broken = True
        await asyncio.sleep(2 * MAX_AGE_S)
        assert cut_off.knows
        cut_off.watch.doubt()
        await asyncio.sleep(MAX_AGE_S + PERIOD_S)
        assert not cut_off.knows
        assert all(engine.knows for engine in cluster.engines if engine is not cut_off)
        cut_off.queue.broken = False
        await asyncio.sleep(PERIOD_S + 0.05)
        assert cut_off.knows
        await asyncio.sleep(1.0)
        assert len(await cluster.readers_in(3.0)) == 1


@virtual
async def test_an_older_reading_replaces_no_newer_one_and_another_queue_is_looked_at():
    async with Cluster(1).open() as cluster:
        [engine] = cluster.engines
        looks: list[str] = []
        engine.queue.heard = looks.append  # type: ignore[method-assign]

        async def say(**fields: Any) -> None:
            reading = QueueReading(engine_id="e9", tokens=0, identity="q2", **fields)
            await cluster.messaging.publish(names.depth_subject(NAMESPACE), encode(reading))
            await asyncio.sleep(0.01)

        await say(jobs=8, age_s=3.0)
        assert engine.watch.view is not None and engine.watch.view.jobs == 0
        await say(jobs=7, age_s=0.0)
        assert engine.watch.view is not None and engine.watch.view.jobs == 7
        assert looks == ["q2", "q2"]
        await say(jobs=9, age_s=0.0, wire_version=1)
        await cluster.messaging.publish(names.depth_subject(NAMESPACE), b"nonsense")
        await asyncio.sleep(0.01)
        assert (len(looks), engine.drops) == (2, ["queue_reading"])


@virtual
async def test_after_a_push_that_failed_only_readings_of_its_own_count():
    """A full queue is none of these: the broker has answered."""
    async with Scene().open(WRITER) as scene:
        doubts: list[None] = []
        scene.decode.net.queue_watch.doubt = lambda: doubts.append(None)
        scene.decode.queue.push = failing(QueueFull("full"))
        assert scene.decode.admit(prompt("r1", 10)) > 0
        await asyncio.sleep(0.1)
        assert scene.counted("refused") == 1 and not doubts
        for count, error in enumerate((BrokerUnavailable("gone"), PushAmbiguous("late")), 1):
            scene.decode.queue.push = failing(error)
            assert scene.decode.admit(prompt(f"s{count}", 10)) > 0
            await asyncio.sleep(0.1)
            assert len(doubts) == count


def failing(error: DynamoLiteError) -> Any:
    async def push(*_: Any, **__: Any) -> int:
        raise error

    return push
