"""PrefillQueue: on a real JetStream, and its twin in memory."""

import asyncio
import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from dynamo_lite.disagg.decision.lanes import PATIENCE, Lane
from dynamo_lite.disagg.queue import puller
from dynamo_lite.disagg.queue.base import Job, PrefillQueue, QueueConfig, QueueDepth
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, QueueFull, StartupError
from dynamo_lite.serve.embedded import EmbeddedNats
from tests.builders import eventually, loop_time
from tests.servers import PrivateServer, Server, jetstream_of, private_server
from tests.twins.queue import MemoryBroker, MemoryQueue

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

_ids = itertools.count()

DEFAULT = QueueConfig()
#: For servers that get no processor for a while. Users of one queue may differ in it.
PUSH_TIMEOUT_S = 10.0


class Opener(Protocol):
    """Opens one more user of the test's queue; it is closed with the test."""

    def __call__(self, config: QueueConfig = ...) -> Awaitable[PrefillQueue]: ...


@pytest.fixture(params=["jetstream", "memory"])
async def open_queue(
    request: pytest.FixtureRequest, nats_url: str, namespace: str
) -> AsyncIterator[Opener]:
    broker = MemoryBroker()
    stream, subject = names.prefill_stream(namespace), names.prefill_jobs_subject(namespace)
    async with AsyncExitStack() as stack:

        async def open_one(config: QueueConfig = DEFAULT) -> PrefillQueue:
            if config.push_timeout_s == DEFAULT.push_timeout_s:
                config = replace(config, push_timeout_s=PUSH_TIMEOUT_S)
            queue: PrefillQueue = (
                MemoryQueue(broker, stream=stream, subject=subject, config=config)
                if request.param == "memory"
                else JetStreamQueue(nats_url, namespace, config)
            )
            return await stack.enter_async_context(queue)

        yield open_one


@contextlib.contextmanager
def patient_lanes() -> Iterator[None]:
    """A lane is not passed over because the broker is slow to say whether it is empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(puller, "GRACE_S", 10.0)
        yield


async def push(queue: PrefillQueue, payload: bytes, lane: Lane = Lane.LONG) -> int:
    return await queue.push(payload, message_id=f"m{next(_ids)}", lane=lane)


async def pull(queue: PrefillQueue, timeout_s: float = 5.0) -> Job:
    job = await queue.pull(timeout_s=timeout_s)
    assert job is not None
    return job


async def until_total(queue: PrefillQueue, total: int) -> None:
    async def reached() -> bool:
        return (await queue.depth()).jobs == total

    await eventually(reached)


async def push_when_there_is_room(queue: PrefillQueue, payload: bytes) -> None:
    """On several servers a finished job leaves the stream some time after its consumer."""

    async def pushed() -> bool:
        try:
            await push(queue, payload)
        except QueueFull:
            return False
        return True

    await eventually(pushed)


async def test_jobs_arrive_in_order_and_leave_at_their_ack(open_queue: Opener):
    decode = await open_queue()
    sequences = [await push(decode, payload) for payload in (b"a", b"b")]
    prefill = await open_queue()
    first = await pull(prefill)
    await until_total(decode, 2)
    second = await pull(prefill)
    assert [first.payload, second.payload] == [b"a", b"b"]
    assert [first.sequence, second.sequence] == sequences
    await until_total(decode, 2)
    await first.ack()
    await second.ack()
    await until_total(decode, 0)


async def test_the_size_is_that_of_all_jobs_until_they_are_over(open_queue: Opener):
    queue = await open_queue()
    assert (await queue.depth()).size == 0
    for payload in (bytes(1000), bytes(5000)):
        await push(queue, payload)
    first = await pull(queue)
    await until_total(queue, 2)
    # A broker adds the subject, the id and some bytes to each.
    assert 6000 <= (await queue.depth()).size < 6500
    await first.ack()
    await until_total(queue, 1)
    assert 5000 <= (await queue.depth()).size < 5250


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
async def test_a_pull_of_an_empty_queue_gives_up(open_queue: Opener, timeout_s: float):
    queue = await open_queue()
    async with asyncio.timeout(2):
        assert await queue.pull(timeout_s=timeout_s) is None
    await push(queue, b"a")
    # A replicated queue may show a job a moment after its push was confirmed.
    job = await eventually(lambda: queue.pull(timeout_s=timeout_s))
    assert job.payload == b"a"


async def test_earlier_lanes_go_first_and_each_keeps_its_order(open_queue: Opener):
    queue = await open_queue()
    sequences = [
        await push(queue, lane.value.encode() + number, lane)
        for number in (b"1", b"2")
        for lane in reversed(Lane)
    ]
    assert sequences == sorted(sequences)
    await until_total(queue, 6)
    with patient_lanes():
        jobs = [await pull(queue) for _ in sequences]
    assert [job.payload.decode() for job in jobs[:4]] == ["urgent1", "urgent2", "short1", "short2"]
    await until_total(queue, 6)


async def test_a_long_job_is_not_passed_over_for_ever(open_queue: Opener):
    queue = await open_queue()
    await push(queue, b"long")
    for _ in range(2 * PATIENCE):
        await push(queue, b"short", Lane.SHORT)
    await until_total(queue, 2 * PATIENCE + 1)
    with patient_lanes():
        taken = [(await pull(queue)).payload for _ in range(PATIENCE + 1)]
    assert taken == [b"short"] * PATIENCE + [b"long"]


async def test_a_pull_ends_at_its_deadline_while_another_one_waits_for_the_same_lanes(
    open_queue: Opener,
):
    """Or the worker would ask for no long job until the other one ends."""
    queue = await open_queue()
    pulling = asyncio.create_task(queue.pull(timeout_s=20, lanes=(Lane.URGENT, Lane.SHORT)))
    async with asyncio.timeout(10):
        for _ in range(3):
            assert await queue.pull(timeout_s=0.1) is None
        await push(queue, b"long")
        assert (await pull(queue)).payload == b"long"
    await push(queue, b"short", Lane.SHORT)
    job = await pulling
    assert job is not None and job.payload == b"short"


async def test_lanes_share_the_cap_the_ids_and_the_end(open_queue: Opener):
    queue = await open_queue(QueueConfig(max_jobs=3))
    sequence = await queue.push(b"a", message_id="once", lane=Lane.SHORT)
    assert await queue.push(b"a", message_id="once", lane=Lane.LONG) == sequence
    await push(queue, b"b", Lane.LONG)
    await push(queue, b"c", Lane.URGENT)
    with pytest.raises(QueueFull):
        await push(queue, b"d", Lane.SHORT)
    assert (await queue.depth()).jobs == 3
    assert await queue.delete(sequence)
    held = await pull(queue)
    assert held.payload == b"c"
    await held.ack()
    await until_total(queue, 1)


async def test_the_cap_is_exact(open_queue: Opener):
    config = QueueConfig(max_jobs=10, push_timeout_s=5.0)
    queues = [await open_queue(config), await open_queue(config)]
    results = await asyncio.gather(
        *(push(queues[i % 2], b"x") for i in range(400)), return_exceptions=True
    )
    accepted = [result for result in results if isinstance(result, int)]
    assert len(accepted) == 10
    assert all(isinstance(result, int | QueueFull) for result in results)
    job = await pull(queues[0])
    with pytest.raises(QueueFull):
        await push(queues[1], b"in flight jobs count")
    await job.ack()
    await push_when_there_is_room(queues[1], b"there is room again")


async def test_a_repeated_message_id_queues_nothing(open_queue: Opener):
    queue = await open_queue(QueueConfig(max_jobs=1))
    sequence = await queue.push(b"a", message_id="once")
    assert await queue.push(b"a", message_id="once") == sequence
    await until_total(queue, 1)
    await (await pull(queue)).ack()
    assert await queue.push(b"a", message_id="once") == sequence
    await until_total(queue, 0)


async def test_a_job_is_delivered_once(open_queue: Opener):
    """Its decode engine owns every retry. It counts until it is over."""
    holder, other = (
        await open_queue(QueueConfig(max_jobs=2)),
        await open_queue(QueueConfig(max_jobs=2)),
    )
    await push(holder, b"a")
    job = await pull(holder)
    await holder.__aexit__(None, None, None)
    assert await other.pull(timeout_s=0.5) is None
    await until_total(other, 1)
    await push(other, b"b")
    with pytest.raises(QueueFull):
        await push(other, b"c")
    assert await other.delete(job.sequence)
    await until_total(other, 1)


@pytest.mark.parametrize("pulled", [False, True])
async def test_a_job_is_dropped_at_the_end_of_its_life(open_queue: Opener, pulled: bool):
    queue = await open_queue()
    sequence = await queue.push(b"a", message_id="short", life_s=3.0)
    await push(queue, b"b")
    await until_total(queue, 2)
    job = await pull(queue) if pulled else None
    await until_total(queue, 1)
    assert not await queue.delete(sequence)
    if job is not None:
        await job.ack()
    assert (await pull(queue)).payload == b"b"
    await until_total(queue, 1)


async def test_an_old_job_is_dropped(open_queue: Opener):
    queue = await open_queue(QueueConfig(max_jobs=1, max_age_s=0.3))
    await push(queue, b"a")
    await push_when_there_is_room(queue, b"b")


async def test_deleting_a_waiting_job(open_queue: Opener):
    queue = await open_queue(QueueConfig(max_jobs=1))
    sequence = await push(queue, b"a")
    await until_total(queue, 1)
    assert await queue.delete(sequence)
    assert not await queue.delete(sequence)
    assert not await queue.delete(sequence + 1000)
    await until_total(queue, 0)
    assert await queue.pull(timeout_s=0.05) is None
    await push(queue, b"b")


async def test_deleting_a_job_in_flight(open_queue: Opener):
    queue = await open_queue(QueueConfig(max_jobs=1))
    sequence = await push(queue, b"a")
    job = await pull(queue)
    assert await queue.delete(sequence)
    await push(queue, b"b")
    await job.ack()
    assert (await pull(queue)).payload == b"b"
    await until_total(queue, 1)


async def test_stop_pulling_ends_a_waiting_pull_and_keeps_held_jobs(open_queue: Opener):
    stopping, other = await open_queue(), await open_queue()
    await push(stopping, b"held")
    held = await pull(stopping)
    pulling = asyncio.create_task(stopping.pull(timeout_s=30))
    await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await stopping.stop_pulling()
        assert await pulling is None
        assert await stopping.pull(timeout_s=30) is None
    await push(other, b"next")
    job = await pull(other)
    assert job.payload == b"next"
    await held.ack()
    await job.ack()
    await until_total(other, 0)


async def test_what_was_delivered_before_pulling_stopped_is_still_pulled(open_queue: Opener):
    """No other worker would get it."""
    stopping = await open_queue()
    lanes, delivered = [], 0
    if isinstance(stopping, JetStreamQueue):
        assert stopping._puller is not None
        lanes, delivered = list(stopping._puller._lanes.values()), 1
    pulling = asyncio.create_task(stopping.pull(timeout_s=30))
    await asyncio.sleep(0.1)
    later = loop_time() + 5  # the first requests do not wait
    await eventually(lambda: all(any(r.until > later for r in lane.requests) for lane in lanes))
    pulling.cancel()  # its requests stay at the server
    await asyncio.gather(pulling, return_exceptions=True)
    await push(stopping, b"a")
    await push(stopping, b"b")
    await eventually(lambda: not lanes or any(lane.arrived for lane in lanes))
    await stopping.stop_pulling()
    left: list[bytes] = []
    while (job := await stopping.pull(timeout_s=30)) is not None:
        left.append(job.payload)
    assert left == [b"a"][:delivered]
    await until_total(stopping, 2)


@pytest.mark.parametrize(
    "other",
    [
        QueueConfig(max_jobs=8),
        QueueConfig(max_age_s=60.0),
        QueueConfig(short_length=7),
    ],
)
async def test_two_services_must_agree_on_the_queue(open_queue: Opener, other: QueueConfig):
    queue = await open_queue()
    with pytest.raises(StartupError, match="another configuration"):
        await open_queue(other)
    await open_queue(QueueConfig(push_timeout_s=9.0))
    await push(queue, b"a")


# The broker loses the queue


class MemoryRig:
    """A broker that a test may take away; it comes back without its queues."""

    def __init__(self) -> None:
        self._broker = MemoryBroker()

    def queue(self, namespace: str) -> MemoryQueue:
        return MemoryQueue(
            self._broker,
            stream=names.prefill_stream(namespace),
            subject=names.prefill_jobs_subject(namespace),
        )

    async def away(self) -> None:
        self._broker.set_connected(False)

    async def back(self) -> None:
        self._broker.lose()
        self._broker.set_connected(True)


class NatsRig:
    def __init__(self, server: Server):
        self._server = server

    def queue(self, namespace: str) -> JetStreamQueue:
        return jetstream(self._server, namespace)

    async def away(self) -> None:
        await self._server.kill()

    async def back(self) -> None:
        await self._server.restart()


@pytest.fixture(params=["jetstream", "memory"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryRig | NatsRig]:
    if request.param == "memory":
        yield MemoryRig()
        return
    async with private_server(EmbeddedNats, tmp_path) as server:
        yield NatsRig(server)


async def test_a_queue_that_the_broker_lost_is_made_again_for_all_users(
    rig: MemoryRig | NatsRig, namespace: str
):
    async with rig.queue(namespace) as decode, rig.queue(namespace) as prefill:
        users = decode, prefill
        for _ in range(2):
            old = await push(decode, b"lost")
            job = await pull(prefill)
            await until_total(decode, 1)
            pulling = asyncio.create_task(pull(prefill, 30))
            await asyncio.sleep(0)
            await rig.away()
            await rig.back()
            async with asyncio.timeout(5):
                now = [await depth_once_back(user) for user in users]
            assert [seen.jobs for seen in now] == [0, 0]
            with contextlib.suppress(BrokerUnavailable):
                await job.ack()
            new = await push(decode, b"new")
            assert new > old
            assert not await decode.delete(old)
            async with asyncio.timeout(15):
                job = await pulling
            assert (job.sequence, job.payload) == (new, b"new")
            await job.ack()
            await until_total(decode, 0)


async def depth_once_back(queue: PrefillQueue) -> QueueDepth:
    while True:
        try:
            return await queue.depth()
        except BrokerUnavailable:
            await asyncio.sleep(0.02)


# JetStream only: the broker dies


def jetstream(server: Server, namespace: str, **options: Any) -> JetStreamQueue:
    return JetStreamQueue(server.url, namespace, QueueConfig(push_timeout_s=0.5), **options)


async def delete_stream(url: str, namespace: str) -> None:
    """As an operator may."""
    async with jetstream_of(url) as js:
        await js.delete_stream(names.prefill_stream(namespace))


async def push_again(queue: PrefillQueue, payload: bytes) -> int:
    """Pushes until the broker is back, with one id: a push whose answer was lost is no other."""
    message_id = f"m{next(_ids)}"
    while True:
        try:
            return await queue.push(payload, message_id=message_id)
        except BrokerUnavailable:
            await asyncio.sleep(0.02)


async def test_pushes_and_depth_fail_fast_while_the_broker_is_away(
    nats_server: PrivateServer, namespace: str
):
    async with jetstream(nats_server, namespace) as queue:
        await nats_server.kill()
        with pytest.raises(BrokerUnavailable):
            await push(queue, b"a")
        async with asyncio.timeout(1.5):  # less than the timeout of an API call
            with pytest.raises(BrokerUnavailable):
                await push(queue, b"a")
            with pytest.raises(BrokerUnavailable):
                await queue.depth()
            with pytest.raises(BrokerUnavailable):
                await queue.delete(1)
            assert await queue.pull(timeout_s=0.05) is None


async def test_a_job_whose_end_the_broker_did_not_hear_is_let_go(
    nats_server: PrivateServer, namespace: str
):
    async with jetstream(nats_server, namespace) as queue:
        await push(queue, b"a")
        job = await pull(queue)
        kept = weakref.ref(job)
        await nats_server.kill()
        with contextlib.suppress(BrokerUnavailable):
            await job.ack()
        del job
        gc.collect()
        assert kept() is None


async def test_no_sequence_is_assigned_twice_where_clocks_differ(
    nats_server: PrivateServer, namespace: str
):
    """The one that creates the stream again has a clock behind that of the first one."""
    async with (
        jetstream(nats_server, namespace, wall=lambda: time.time() + 86_400) as ahead,
        jetstream(nats_server, namespace) as behind,
    ):
        lost = await push(ahead, b"lost")
        held = await pull(ahead)
        await delete_stream(nats_server.url, namespace)
        assert await push(behind, b"new") != lost
        await held.ack()
        assert not await ahead.delete(lost)
        assert (await behind.depth()).jobs == 1


async def test_a_queue_that_others_made_again_is_noticed_without_an_outage(
    nats_server: PrivateServer, namespace: str
):
    async with (
        jetstream(nats_server, namespace) as watching,
        jetstream(nats_server, namespace) as other,
    ):
        pulling = asyncio.create_task(pull(other, 30))
        await asyncio.sleep(0)
        await delete_stream(nats_server.url, namespace)
        await push(other, b"a")
        await eventually(lambda: depth_is(watching, 1))
        async with asyncio.timeout(10):
            assert (await pulling).payload == b"a"


async def depth_is(queue: PrefillQueue, total: int) -> bool:
    return (await queue.depth()).jobs == total
