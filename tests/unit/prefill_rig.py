"""One prefill worker's jobs over the in-process twins, and the decode engine that they are for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.disagg.engine import AttemptOutcome, OnFirstToken
from dynamo_lite.disagg.prefill.job_waits import USUAL_WAITS, JobWaits
from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.disagg.queue.base import Job, QueueConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    Granted,
    RemotePrefillRequest,
    WriterDone,
    decode_claim,
    decode_writer_done,
)
from dynamo_lite.protocol.records import EngineMetadata, encode_engine
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.permits import CELLS_OF_PERMIT, Permit, Permits, PermitVerdict, verdict
from dynamo_lite.runtime.tracing.tracer import Tracer
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.builders import ENGINE, NAMESPACE, engine_metadata, eventually, grant_for, rank_metadata
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.twins.servers import MemoryMessaging, MemoryStore

LEASE = 0xBEEF
BLOCK, POOL = 4, 16
TARGET = engine_metadata(lease_id=7, num_blocks=POOL, ranks=(rank_metadata(),))


class NotedJob:
    """Notes what a job is answered."""

    def __init__(self, job: Job, answers: list[str], delays: list[float]):
        self._job, self._answers, self.delays = job, answers, delays
        self.payload, self.sequence, self.deliveries = job.payload, job.sequence, job.deliveries
        self.deliveries_left = job.deliveries_left

    async def ack(self) -> None:
        self._answers.append("ack")
        await self._job.ack()

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self._answers.append("nak")
        self.delays.append(delay_s)
        await self._job.nak(delay_s=delay_s)

    async def term(self) -> None:
        self._answers.append("term")
        await self._job.term()

    async def extend(self) -> None:
        self._answers.append("extend")
        await self._job.extend()


class NotedQueue(MemoryQueue):
    answers: list[str]
    delays: list[float]

    async def pull(self, **wanted: Any) -> Any:
        job = await super().pull(**wanted)
        return None if job is None else NotedJob(job, self.answers, self.delays)


class ScriptedEngine:
    """A Prefiller that ends an attempt when it may be written, or when the test releases it.

    cells: those of its permits. attempts: begun. written: those that it was allowed to write.
    """

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells
        self.attempts: list[str] = []
        self.written: list[str] = []
        self.permits: dict[str, Permit] = {}
        self.abandoned: list[str] = []
        self.raises: DynamoLiteError | None = None
        self.holds = False
        #: The first token, if it gives one.
        self.samples: int | None = None
        self.ends: dict[str, asyncio.Future[str]] = {}

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        permit: Permit,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        assert target.engine_id == job.engine_id
        self.attempts.append(job.attempt)
        if self.raises is not None:
            raise self.raises
        if self.samples is not None:
            await on_first_token(self.samples, 8)
        end = self.ends[job.attempt] = asyncio.get_running_loop().create_future()
        self.permits[job.attempt] = permit
        if not self.holds:
            while not end.done() and self.verdict(job.attempt) is PermitVerdict.PENDING:
                await asyncio.sleep(0)
            if not end.done():
                granted = self.verdict(job.attempt) is PermitVerdict.GRANTED
                end.set_result("written" if granted else "abandoned")
        outcome = AttemptOutcome(job.attempt, await end)
        if self.verdict(job.attempt) is PermitVerdict.GRANTED and outcome.outcome == "written":
            self.written.append(job.attempt)
        return outcome

    async def abandon(self, attempt: str) -> None:
        self.abandoned.append(attempt)
        if attempt in self.ends and not self.ends[attempt].done():
            self.ends[attempt].set_result("abandoned")

    def verdict(self, attempt: str) -> PermitVerdict:
        return verdict(self.cells, self.permits[attempt])


class Rig:
    """One worker's jobs, and the decode engine that they are for."""

    def __init__(
        self,
        *,
        ack_wait_s: float,
        redeliver_s: float,
        links: PeerLinks | None = None,
        tracer: Tracer | None = None,
        waits: JobWaits = USUAL_WAITS,
    ):
        self.broker, self.messaging, self.store = MemoryBroker(), MemoryMessaging(), MemoryStore()
        cells = [0] * (16 * CELLS_OF_PERMIT)
        self.engine, self.registry = ScriptedEngine(cells), CollectorRegistry()
        config = QueueConfig(ack_wait_s=redeliver_s)
        self.queue = NotedQueue(self.broker, stream="s", subject="s.jobs", config=config)
        self.queue.answers, self.queue.delays = [], []
        #: Stands still unless a test moves it.
        self.boottime_s = 1000.0
        self.jobs = PrefillJobs(
            namespace=NAMESPACE,
            lease_id=LEASE,
            ack_wait_s=ack_wait_s,
            queue=self.queue,
            engine=self.engine,
            permits=Permits(cells),
            directory=MetadataDirectory(self.store, NAMESPACE),
            messaging=self.messaging,
            registry=self.registry,
            links=links,
            tracer=tracer,
            waits=waits,
            clock=Clock(boottime=lambda: self.boottime_s),
        )
        self.pushed = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.claims: list[Claim] = []
        self.done: list[WriterDone] = []
        self.verdicts: list[Granted | ClaimRefused] = []
        #: By attempt.
        self.pushed_jobs: dict[str, RemotePrefillRequest] = {}
        #: How the grants differ from the right ones.
        self.grant_changes: dict[str, Any] = {}
        self.on_claim: Callable[[], Awaitable[Any]] | None = None

    @property
    def answers(self) -> list[str]:
        return [answer for answer in self.queue.answers if answer != "extend"]

    @property
    def told(self) -> list[tuple[str, str]]:
        assert all(done.writer_lease_id == LEASE for done in self.done)
        return [(done.attempt, done.outcome) for done in self.done]

    def counted(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("dynamo_lite_prefill_jobs_total", labels) or 0.0

    def pull(self) -> None:
        """The worker takes one more job at a time."""
        self.tasks.append(asyncio.create_task(self.jobs.run()))

    async def push(self, job: RemotePrefillRequest | bytes) -> None:
        payload = job if isinstance(job, bytes) else encode(job)
        if not isinstance(job, bytes):
            self.pushed_jobs[job.attempt] = job
        self.pushed += 1
        await self.queue.push(payload, message_id=str(self.pushed))

    async def answered(self, *answers: str) -> None:
        await eventually(lambda: self.answers == list(answers))

    async def total(self) -> int:
        return (await self.queue.depth()).total

    async def claim(self, payload: bytes) -> bytes | None:
        self.claims.append(decode_claim(payload))
        if self.on_claim is not None:
            await self.on_claim()
        if self.verdicts:
            return encode(self.verdicts.pop(0))
        claim = self.claims[-1]
        grant = grant_for(claim, self.pushed_jobs[claim.attempt], **self.grant_changes)
        return encode(Granted(grant=grant))

    async def take_done(self, payload: bytes) -> None:
        self.done.append(decode_writer_done(payload))


@contextlib.asynccontextmanager
async def working(
    *,
    runners: int = 1,
    serving: bool = True,
    pulls: bool = True,
    ack_wait_s: float = 30.0,
    redeliver_s: float = 30.0,
    links: PeerLinks | None = None,
    tracer: Tracer | None = None,
    waits: JobWaits = USUAL_WAITS,
) -> AsyncIterator[Rig]:
    """ack_wait_s: what the worker believes. redeliver_s: what the broker does. pulls: from the
    beginning."""
    rig = Rig(
        ack_wait_s=ack_wait_s,
        redeliver_s=redeliver_s,
        links=links,
        tracer=tracer,
        waits=waits,
    )
    serve = rig.messaging.serve
    await rig.store.put(names.nixl_metadata_key(NAMESPACE, ENGINE), encode_engine(TARGET))
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(rig.queue)
        await enter(serve(names.writer_done_subject(NAMESPACE, ENGINE), rig.take_done))
        if serving:
            await enter(serve(names.claim_subject(NAMESPACE, ENGINE), rig.claim))
        await enter(serve(names.cancel_subject(NAMESPACE, LEASE), rig.jobs.on_cancel))
        tasks = rig.tasks
        for _ in range(runners if pulls else 0):
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
    """why_not: why no engine's link is used, `times` times."""

    def __init__(self, why_not: str = "", times: int = 1000):
        self.why_not, self.times, self.successes = why_not, times, list[str]()

    def trouble(self, target: EngineMetadata) -> str:
        assert target.engine_id == ENGINE
        self.times -= 1
        return self.why_not if self.times >= 0 else ""

    def worked(self, engine_id: str) -> None:
        self.successes.append(engine_id)
