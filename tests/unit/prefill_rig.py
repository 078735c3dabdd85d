"""One prefill worker's jobs over the in-process twins, and the decode engine that they are for."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.engine import AttemptOutcome, OnFirstToken
from dynamo_lite.disagg.prefill.attempt import WriterParts
from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.disagg.prefill.peer_links import PeerLink
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.kv_regions import decode_engine
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    Done,
    Held,
    RemotePrefillRequest,
    decode_claim,
    decode_done,
)
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell, ClaimCells
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.tracing import Tracer
from tests.builders import (
    ENGINE,
    NAMESPACE,
    engine_metadata,
    eventually,
    loop_time,
    rank_metadata,
)
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.twins.servers import MemoryMessaging, MemoryStore

LEASE = 0xBEEF
POOL = 16
TARGET = engine_metadata(lease_id=7, num_blocks=POOL, ranks=(rank_metadata(),))
#: For how long the decode engine's answers extend claims.
CLAIM_S = 3.0


class NotedQueue(MemoryQueue):
    """kept: jobs that the broker has delivered and that were not pulled."""

    #: Sequences.
    acked: list[int]
    kept: list[Job]

    async def pull(self, **wanted: Any) -> Job | None:
        job = await super().pull(**wanted)
        if job is None and self.kept:
            job = self.kept.pop(0)
        return None if job is None else replace(job, ack=partial(self._noted, job))

    async def _noted(self, job: Job) -> None:
        for _ in range(3):  # what was published before has been handled then
            await asyncio.sleep(0)
        self.acked.append(job.sequence)
        await job.ack()


class ScriptedEngine:
    """A PrefillEngine that ends an attempt at once, or when the test does.

    attempts: begun. written: those that ended while it might write. cells: of its attempts.
    """

    def __init__(self, cells: ClaimCells, now: Callable[[], float]) -> None:
        self._read, self._now = cells.read, now
        self.attempts: list[str] = []
        self.written: list[str] = []
        self.cells: dict[str, Cell] = {}
        self.abandoned: list[str] = []
        self.raises: DynamoLiteError | None = None
        self.holds = False
        #: Whether an abandoned attempt ends at once; else its writes are still in flight.
        self.drains = True
        self.ends: dict[str, asyncio.Future[str]] = {}

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        cell: Cell,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        assert target.engine_id == job.engine_id
        self.attempts.append(job.attempt)
        self.cells[job.attempt] = cell
        assert self.open(job.attempt), "it computes before its claim is held"
        if self.raises is not None:
            raise self.raises
        end = self.ends[job.attempt] = asyncio.get_running_loop().create_future()
        if not self.holds:
            end.set_result("written" if self.open(job.attempt) else "abandoned")
        outcome = AttemptOutcome(job.attempt, await end)
        if outcome.outcome == "written" and self.open(job.attempt):
            self.written.append(job.attempt)
        return outcome

    async def abandon(self, attempt: str) -> None:
        self.abandoned.append(attempt)
        if self.drains and attempt in self.ends and not self.ends[attempt].done():
            self.ends[attempt].set_result("abandoned")

    def until(self, attempt: str) -> float:
        return self._read(self.cells[attempt])

    def open(self, attempt: str) -> bool:
        """Whether a rank may write it now."""
        return self._now() < self.until(attempt)


class Rig:
    """One worker's jobs, and the decode engine that they are for."""

    def __init__(self, *, links: "ScriptedLinks | None" = None, tracer: Tracer | None = None):
        self.broker, self.messaging, self.store = MemoryBroker(), MemoryMessaging(), MemoryStore()
        #: How far the host's clock is ahead of the loop's, as if the process had stood still.
        self.stalled_s = 0.0
        self.cells = ClaimCells(16)
        self.engine, self.registry = ScriptedEngine(self.cells, self.boottime), CollectorRegistry()
        self.queue = NotedQueue(self.broker, stream="s", subject="s.jobs")
        self.queue.acked, self.queue.kept = [], []
        ids = itertools.count(1)
        self.links: ScriptedLinks = links or ScriptedLinks()
        self.links.store = self.store
        parts = WriterParts(
            namespace=NAMESPACE,
            lease_id=LEASE,
            engine=self.engine,  # type: ignore[arg-type]
            cells=self.cells,
            messaging=self.messaging,
            links=self.links,  # type: ignore[arg-type]
            tracer=tracer,
            new_claim=lambda: next(ids),
            clock=Clock(monotonic=loop_time, boottime=self.boottime),
        )
        self.jobs = PrefillJobs(parts, self.queue, self.registry)
        self.pushed = 0
        self.tasks: list[asyncio.Task[None]] = []
        #: When each claim came, and the claim.
        self.heard: list[tuple[float, Claim]] = []
        self.done: list[Done] = []
        #: What the next claims are answered, in place of `CLAIM_S`; None: nothing.
        self.answers: list[Held | ClaimRefused | bytes | None] = []
        self.on_claim: Callable[[], Awaitable[Any]] | None = None

    def boottime(self) -> float:
        return loop_time() + self.stalled_s

    @property
    def claims(self) -> list[Claim]:
        return [claim for _, claim in self.heard]

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(done.attempt, done.outcome) for done in self.done]

    def counted(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("dynamo_lite_prefill_jobs_total", labels) or 0.0

    def pull(self) -> None:
        """The worker takes one more job at a time."""
        self.tasks.append(asyncio.create_task(self.jobs.run()))

    async def push(self, job: RemotePrefillRequest | bytes) -> None:
        payload = job if isinstance(job, bytes) else encode(job)
        self.pushed += 1
        await self.queue.push(payload, message_id=str(self.pushed))

    async def begin(self, job: RemotePrefillRequest) -> None:
        """The engine computes this job until the test ends it."""
        self.engine.holds = True
        await self.push(job)
        await eventually(lambda: job.attempt in self.engine.ends)

    async def acked(self, jobs: int = 1) -> None:
        await eventually(lambda: len(self.queue.acked) == jobs)

    async def total(self) -> int:
        return (await self.queue.depth()).jobs

    async def claim(self, payload: bytes) -> bytes | None:
        self.heard.append((self.boottime(), decode_claim(payload)))
        if self.on_claim is not None:
            await self.on_claim()
        answer = self.answers.pop(0) if self.answers else Held(for_s=CLAIM_S)
        return answer if isinstance(answer, bytes | None) else encode(answer)

    async def take_done(self, payload: bytes) -> None:
        self.done.append(decode_done(payload))


@contextlib.asynccontextmanager
async def working(
    *,
    runners: int = 1,
    serving: bool = True,
    links: "ScriptedLinks | None" = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Rig]:
    """serving: whether the decode engine answers claims."""
    rig = Rig(links=links, tracer=tracer)
    serve = rig.messaging.serve
    await rig.store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), encode_json(TARGET))
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(rig.queue)
        await enter(serve(names.done_subject(NAMESPACE, ENGINE), rig.take_done))
        if serving:
            await enter(serve(names.claim_subject(NAMESPACE, ENGINE), rig.claim))
        tasks = rig.tasks
        for _ in range(runners):
            rig.pull()
        try:
            yield rig
            await rig.jobs.stop()
            async with asyncio.timeout(10):
                await asyncio.gather(*tasks)
            assert not rig.jobs.working and rig.jobs.idle.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class ScriptedLinks:
    """The link to the engine whose record is in the store. why_not: why it is not used."""

    def __init__(self, why_not: str = ""):
        self.link, self.known = PeerLink(TARGET), dict[str, PeerLink]()
        self.link.mark, self.link.reads, self.link.failures = why_not, True, 1
        self.store = MemoryStore()

    async def look_up(self, engine_id: str) -> PeerLink | None:
        raw = await self.store.get(names.nixl_metadata_key(NAMESPACE, engine_id))
        if raw is None:
            return None
        decode_engine(raw)
        return self.link
