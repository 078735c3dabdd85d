"""Until when a prefill worker's engine may write: the lease, then its own promises."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_lite.disagg.prefill.fence_updater import FenceUpdater
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import (
    RemotePrefillRequest,
    StayAccepted,
    StayRefused,
    WriterStays,
    decode_writer_stays,
)
from dynamo_lite.runtime.clock import Clock, boottime
from dynamo_lite.runtime.fence import FenceHolder, FenceReader
from tests.builders import eventually, prefill_job
from tests.twins.servers import MemoryMessaging, MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

ACCEPTED = encode(StayAccepted())
NUMBER = 7
TTL_S = 3.0
PROMISE_S = 4.5


class NotedFence(FenceHolder):
    """Notes until when it was open; 0.0 for a fence that was lowered. delay_s: as of a process
    that loses its core before it has written the deadline."""

    def __init__(self, path):
        super().__init__(path)
        self.deadlines: list[float] = []
        self.delay_s = 0.0

    def open_until(self, deadline: float) -> None:
        time.sleep(self.delay_s)
        super().open_until(deadline)
        (written,) = struct.unpack_from("<d", self.path.read_bytes())
        self.deadlines.append(written)


class Worker:
    """A prefill worker with `working` jobs; `now` is the store's clock. ahead_s: how far the
    worker's own clock has jumped."""

    def __init__(self, tmp_path):
        self.now, self.ahead_s = 1000.0, 0.0
        self.store = MemoryStore(clock=lambda: self.now)
        self.messaging = MemoryMessaging()
        self.fence = NotedFence(tmp_path / "fence")
        self.reader = FenceReader(self.fence.path)
        self.working: dict[str, RemotePrefillRequest] = {}
        self.abandoned: list[str] = []
        self.heard: list[tuple[float, WriterStays]] = []
        self.answers: dict[str, bytes] = {}
        self.lease: Any = None
        self.keeper: Any = None
        self.keeping: Any = None

    def work(self, attempt: str, engine_id: str = "e1") -> None:
        self.working[attempt] = prefill_job(attempt, engine_id=engine_id)

    async def abandon(self, attempt: str) -> None:
        self.abandoned.append(attempt)

    @property
    def claimed(self) -> list[tuple[RemotePrefillRequest, int]]:
        return [(job, NUMBER) for job in self.working.values()]

    async def hear(self, payload: bytes) -> bytes:
        stays = decode_writer_stays(payload)
        self.heard.append((boottime(), stays))
        return self.answers.get(stays.attempt, ACCEPTED)

    @asynccontextmanager
    async def decode_engine(self, engine_id: str = "e1") -> AsyncIterator[None]:
        async with self.messaging.serve(names.writer_stays_subject("t", engine_id), self.hear):
            yield

    def begin(self) -> None:
        host: Any = SimpleNamespace(
            lease=self.lease,
            messaging=self.messaging,
            clock=Clock(boottime=lambda: boottime() + self.ahead_s),
            spec=SimpleNamespace(namespace="t"),
        )
        self.keeper = FenceUpdater(host, self.fence, promise_s=PROMISE_S)
        self.keeper.jobs = self
        self.keeping = asyncio.create_task(self.keeper.keep())

    async def leave(self, how: str) -> int:
        """Returns how often the fence had been extended before."""
        before = len(self.fence.deadlines)
        if how == "revoked":
            await self.store.revoke(self.lease.id)
        self.keeper.leaving.set()
        return before


@pytest.fixture
async def worker(tmp_path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(worker.fence.close)
        stack.callback(worker.reader.close)
        worker.lease = await stack.enter_async_context(worker.store.lease(TTL_S))
        worker.begin()
        yield worker
        worker.keeping.cancel()
        results = await asyncio.gather(worker.keeping, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError | None)


async def test_a_serving_worker_may_write_as_long_as_its_lease_lives(worker):
    worker.work("a1")
    await eventually(lambda: len(worker.fence.deadlines) >= 3)
    assert all(0 < d <= boottime() + TTL_S for d in worker.fence.deadlines)
    assert worker.reader.open()
    assert (worker.heard, worker.abandoned) == ([], [])


async def test_a_lease_that_is_not_refreshed_is_not_stretched(worker):
    await eventually(lambda: worker.fence.deadlines)
    worker.store.set_available(False)
    worker.now += TTL_S - 0.01
    asked_at, before = boottime(), len(worker.fence.deadlines)
    await eventually(lambda: len(worker.fence.deadlines) > before + 1)
    assert 0 < worker.fence.deadlines[-1] - asked_at < TTL_S


async def test_a_worker_that_stood_still_until_its_fence_closed_abandons_what_it_has_claimed(
    worker,
):
    """Its lease lives on in a thread of its own; decode engines may have given up on it."""
    worker.work("a1")
    await eventually(worker.reader.open)
    worker.ahead_s = 2 * TTL_S
    await eventually(lambda: worker.abandoned == ["a1"])
    await eventually(worker.reader.open)
    assert worker.abandoned == ["a1"]


async def test_an_expired_lease_lowers_the_fence_for_good(worker):
    await eventually(worker.reader.open)
    assert not worker.keeper.closed.is_set()
    worker.store.set_available(False)
    worker.now += TTL_S
    worker.store.expire_due()
    async with asyncio.timeout(10):
        await worker.keeping
    assert worker.keeper.closed.is_set()
    assert not worker.reader.open()
    assert worker.fence.deadlines[-1] == 0.0


@pytest.mark.parametrize("how", ["asked", "revoked"])
async def test_a_leaving_worker_writes_no_longer_than_it_promised(worker, how):
    await eventually(lambda: worker.fence.deadlines)
    worker.work("a1")
    worker.work("a2")
    worker.fence.delay_s = 0.05
    async with worker.decode_engine():
        before = await worker.leave(how)
        await eventually(lambda: len(worker.fence.deadlines) >= before + 3)
        assert {stays.attempt for _, stays in worker.heard} == {"a1", "a2"}
        assert {stays.writer_lease_id for _, stays in worker.heard} == {worker.lease.id}
        assert {stays.number for _, stays in worker.heard} == {NUMBER}
        for deadline in worker.fence.deadlines[before:]:
            for attempt in ("a1", "a2"):
                until = [at + s.for_s for at, s in worker.heard if s.attempt == attempt]
                assert any(deadline <= promised for promised in until)
        assert worker.reader.open()
        assert worker.abandoned == []


async def test_an_attempt_whose_engine_does_not_hear_is_abandoned(worker):
    await eventually(lambda: worker.fence.deadlines)
    worker.work("a1", "e1")
    worker.work("a2", "e2")
    async with worker.decode_engine("e1"):
        before = await worker.leave("asked")
        await eventually(lambda: worker.abandoned)
        assert set(worker.abandoned) == {"a2"}
        assert len(worker.fence.deadlines) == before
        del worker.working["a2"]
        await eventually(lambda: len(worker.fence.deadlines) > before)
        assert worker.reader.open()


@pytest.mark.parametrize(
    "answer",
    [
        encode(StayRefused(reason="unknown or ended attempt")),
        b"",  # what earlier versions answer, whether they know the attempt or not
        b"\xff",
    ],
)
async def test_an_attempt_whose_engine_does_not_say_yes_is_abandoned(worker, answer):
    """The engine may have given its blocks to other requests."""
    await eventually(lambda: worker.fence.deadlines)
    worker.work("a1")
    worker.work("a2")
    worker.answers["a2"] = answer
    async with worker.decode_engine():
        before = await worker.leave("asked")
        await eventually(lambda: len(worker.heard) >= 4)
        assert set(worker.abandoned) == {"a2"}
        assert len(worker.fence.deadlines) == before
        del worker.working["a2"]
        await eventually(lambda: len(worker.fence.deadlines) > before)
        assert worker.reader.open()


async def test_a_promise_that_is_heard_late_counts_from_when_it_was_made(worker):
    await eventually(lambda: worker.fence.deadlines)
    worker.work("a1")
    late = asyncio.Event()

    async def slow(payload: bytes) -> bytes:
        worker.heard.append((boottime(), decode_writer_stays(payload)))
        await late.wait()
        return ACCEPTED

    async with worker.messaging.serve(names.writer_stays_subject("t", "e1"), slow):
        before = await worker.leave("asked")
        await eventually(lambda: worker.heard)
        asked_by = worker.heard[0][0]
        late.set()
        await eventually(lambda: len(worker.fence.deadlines) > before or worker.abandoned)
        assert worker.fence.deadlines[-1] <= asked_by + PROMISE_S


async def test_a_fence_that_closed_stays_closed_when_promises_are_heard_again(worker):
    """The engine accepts promises for attempts that it still holds for this worker, but the
    worker's own fence stays closed."""
    await eventually(lambda: worker.fence.deadlines)
    worker.work("a1")
    async with worker.decode_engine():
        worker.messaging.set_connected(False)
        await worker.leave("asked")
        await eventually(lambda: not worker.reader.open())
        worker.messaging.set_connected(True)
        async with asyncio.timeout(10):
            await worker.keeper.closed.wait()
            await worker.keeping
        assert not worker.reader.open()
        assert worker.fence.deadlines[-1] == 0.0
