"""A decode engine takes queued remote prefills back while workers pull and claim: on JetStream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.prefill import ClaimRefused
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.runtime.permits import Permits
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.builders import (
    ENGINE,
    NAMESPACE,
    ManualClock,
    engine_metadata,
    eventually,
    rank_metadata,
)
from tests.twins.servers import MemoryStore
from tests.unit.decode_engine import POOL, WRITER, Decode
from tests.unit.prefill_rig import ScriptedEngine, ScriptedLinks
from tests.unit.test_taking_back import LIMIT_S, LONG_S

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

ACK_WAIT_S = 0.5
TARGET = engine_metadata(lease_id=1, num_blocks=POOL, ranks=(rank_metadata(),))


class Scene:
    """A decode engine and a queue on JetStream, and prefill workers as they are started."""

    def __init__(self, stack: AsyncExitStack, nats_url: str, namespace: str):
        self.stack, self._nats_url, self._namespace = stack, nats_url, namespace
        self.decode, self.store = Decode(ManualClock()), MemoryStore()
        #: Claims wait for this one.
        self.may_claim = asyncio.Event()
        self.claims = 0

    async def open_queue(self) -> JetStreamQueue:
        queue = JetStreamQueue(
            self._nats_url,
            stream=names.prefill_stream(self._namespace),
            subject=names.prefill_jobs_subject(self._namespace),
            config=QueueConfig(ack_wait_s=ACK_WAIT_S, push_timeout_s=10.0),
        )
        return await self.stack.enter_async_context(queue)

    async def start(self) -> None:
        decode, messaging = self.decode, self.decode.messaging
        await self.store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), encode_engine(TARGET))
        decode.use(await self.open_queue())

        async def claim(payload: bytes) -> bytes:
            self.claims += 1
            await self.may_claim.wait()
            return await decode.writer_events.on_claim(payload)

        for subject, handler in (
            (names.claim_subject(NAMESPACE, ENGINE), claim),
            (names.writer_done_subject(NAMESPACE, ENGINE), decode.writer_events.on_done),
        ):
            await self.stack.enter_async_context(messaging.serve(subject, handler))

    async def work(self) -> ScriptedEngine:
        """Starts a prefill worker. The returned engine ends attempts when the test lets it."""
        cells = [0, 0]
        engine = ScriptedEngine(cells)
        jobs = PrefillJobs(
            namespace=NAMESPACE,
            lease_id=WRITER,
            ack_wait_s=ACK_WAIT_S,
            queue=await self.open_queue(),
            engine=engine,
            permits=Permits(cells),
            directory=MetadataDirectory(self.store, NAMESPACE),
            messaging=self.decode.messaging,
            registry=CollectorRegistry(),
            links=ScriptedLinks(),
        )
        task = asyncio.create_task(jobs.run())
        self.stack.push_async_callback(asyncio.wait_for, task, 10)
        self.stack.push_async_callback(jobs.stop)
        return engine

    async def jobs(self) -> int:
        return (await self.decode.queue.depth()).total

    async def has_jobs(self, number: int) -> None:
        """A push or a deletion is counted a moment after its answer."""

        async def reached() -> bool:
            return await self.jobs() == number

        await eventually(reached)

    async def none_left(self) -> None:

        async def none() -> bool:
            return not await self.jobs()

        await eventually(none)


@pytest.fixture
async def scene(nats_url: str, namespace: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        scene = Scene(stack, nats_url, namespace)
        await scene.start()
        scene.decode.tune(max_queue_wait_s=LIMIT_S)
        try:
            yield scene
        finally:
            scene.may_claim.set()
            await scene.decode.network()


async def test_a_job_that_is_taken_back_leaves_the_queue_and_the_others_stay(scene: Scene):
    decode = scene.decode
    first = await decode.ask("r1", 100)
    decode.clock.now += LONG_S - 0.5
    second = await decode.ask("r2", 100)
    await scene.has_jobs(2)
    decode.clock.now += 0.5
    assert decode.half.build_step().give_up == [(first, "r1")]
    await decode.network()
    await scene.has_jobs(1)
    decode.output(failed=["r1"])
    scene.may_claim.set()
    engine = await scene.work()
    await scene.none_left()
    assert engine.written == [second]
    assert decode.counted("remote/taken_back") == 1


async def test_a_job_whose_claim_crosses_is_let_go_and_nothing_is_written(scene: Scene):
    """The worker has pulled the job and computes; its claim comes when it is taken back."""
    decode = scene.decode
    attempt = await decode.ask("r1", 100)
    engine = await scene.work()
    await eventually(lambda: scene.claims == 1 and engine.attempts == [attempt])
    decode.clock.now += LONG_S
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    scene.may_claim.set()
    await decode.network()
    decode.output(failed=["r1"])
    await scene.none_left()
    await eventually(lambda: engine.abandoned == [attempt] or engine.ends[attempt].done())
    assert engine.written == []
    decode.finish("r1")
    # The worker goes on to the next one.
    decode.sees()
    other = await decode.ask("r2", 100)
    await eventually(lambda: engine.written == [other])


async def test_a_granted_job_is_not_taken_back(scene: Scene):
    decode = scene.decode
    scene.may_claim.set()
    engine = await scene.work()
    engine.holds = True
    attempt = await decode.ask("r1", 100)
    await eventually(lambda: decode.ledger.writer(attempt) == WRITER)
    decode.clock.now += LONG_S
    assert decode.half.build_step().give_up == []
    engine.ends[attempt].set_result("written")
    await scene.none_left()
    assert engine.written == [attempt]


async def test_a_job_that_was_pulled_and_dropped_is_not_delivered_again(scene: Scene):
    """Its worker died before it claimed. Without the end of the job it would come again."""
    decode = scene.decode
    attempt = await decode.ask("r1", 100)
    job = await decode.queue.pull(timeout_s=5.0)
    assert job is not None and job.deliveries == 1
    decode.clock.now += LONG_S
    assert decode.half.build_step().give_up == [(attempt, "r1")]
    await decode.network()
    await scene.has_jobs(0)
    assert await decode.queue.pull(timeout_s=3 * ACK_WAIT_S) is None
    assert isinstance(await decode.claim(attempt), ClaimRefused)
