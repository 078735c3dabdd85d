"""The jobs of a prefill worker, from the pull to the one answer to the queue.

A job is acknowledged when it is over: written, its claim refused, or reported to the decode
engine as failed. If the worker dies, the job stays unacknowledged and the queue delivers it
again. A job leaves the queue only when its decode engine knows: the engine has refused the
claim, or the outcome was reported to it. A job for an engine without a usable link is left
to other workers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.disagg.engine import PrefillEngine
from dynamo_lite.disagg.prefill.claims import Claims
from dynamo_lite.disagg.prefill.job_runner import JobRunner
from dynamo_lite.disagg.prefill.job_trace import trace_job
from dynamo_lite.disagg.prefill.job_waits import USUAL_WAITS, JobWaits
from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.disagg.queue.base import Job, PrefillQueue
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Unavailable
from dynamo_lite.protocol.prefill import RemotePrefillRequest, decode_cancel_attempt, decode_job
from dynamo_lite.protocol.queue import Lane
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.permits import Permits
from dynamo_lite.runtime.tasks import running
from dynamo_lite.runtime.tracing.tracer import Tracer
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)

_PULL_S = 2.0
_UNFIT_PAUSE_S = 0.2


class PrefillJobs:
    """fit: whether the engine can take a job now; while not, no job is pulled. links: the
    links to decode engines; None if all count as usable. permits: those that the engine's ranks
    read. tracer: None without tracing.
    """

    def __init__(
        self,
        *,
        namespace: str,
        lease_id: int,
        ack_wait_s: float,
        queue: PrefillQueue,
        engine: PrefillEngine,
        permits: Permits,
        directory: MetadataDirectory,
        messaging: Messaging,
        registry: CollectorRegistry,
        fit: Callable[[], bool] = lambda: True,
        links: PeerLinks | None = None,
        clock: Clock = SYSTEM_CLOCK,
        on_drop: OnDrop = uncounted,
        tracer: Tracer | None = None,
        waits: JobWaits = USUAL_WAITS,
    ):
        self._waits = waits
        self._tracer, self._now, self._ack_wait_s = tracer, clock.monotonic, ack_wait_s
        self._queue, self._fit, self._on_drop = queue, fit, on_drop
        self._claims = Claims(
            namespace=namespace,
            lease_id=lease_id,
            messaging=messaging,
            registry=registry,
            clock=clock,
            on_drop=on_drop,
            waits=waits,
        )
        self._ended = Counter(
            "dynamo_lite_prefill_jobs",
            "Prefill jobs pulled, by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._written_tokens = Counter(
            "dynamo_lite_prefill_written_tokens",
            "Prompt tokens of the jobs that were written, without those that their decode workers"
            " had",
            registry=registry,
        )
        self._busy_s = Counter(
            "dynamo_lite_prefill_busy_seconds",
            "Time in which at least one job was in progress; counted when a job ends",
            registry=registry,
        )
        self._runner = JobRunner(
            engine=engine,
            permits=permits,
            directory=directory,
            claims=self._claims,
            registry=registry,
            links=links,
            clock=clock,
        )
        self._pulling = True
        #: Attempt -> job, for jobs that were pulled and are not over.
        self.working: dict[str, RemotePrefillRequest] = {}
        #: Until when `_busy_s` is counted.
        self._busy_until = 0.0
        #: Set while `working` is empty.
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self, lanes: Sequence[Lane] = tuple(Lane)) -> None:
        """Runs one job of these lanes after the other until `stop`. For several jobs at a time
        call it several times."""
        while self._pulling:
            if not self._fit():
                await asyncio.sleep(_UNFIT_PAUSE_S)
                continue
            try:
                job = await self._queue.pull(timeout_s=_PULL_S, lanes=lanes)
            except Unavailable as exc:
                logger.debug("no job pulled: %s", exc)
                await asyncio.sleep(self._waits.broker_pause_s)
                continue
            if job is not None:
                await self._run_job(job)

    async def stop(self) -> None:
        """Stops pulling; pulled jobs continue."""
        self._pulling = False
        await self._queue.stop_pulling()

    async def on_cancel(self, payload: bytes) -> None:
        cancel = decode_cancel_attempt(payload)
        if cancel.attempt in self.working:
            await self.abandon(cancel.attempt)
        else:
            await self._runner.answer_cancel(cancel)

    async def abandon(self, attempt: str) -> None:
        """Stops a job: no write of it starts any more. Its outcome is reported as usual."""
        await self._runner.abandon(attempt, running=attempt in self.working)

    @property
    def claimed(self) -> list[tuple[RemotePrefillRequest, int]]:
        """Jobs with a claim that was sent and may have been granted, with the claim's number."""
        held = self._claims.held
        return [(self.working[attempt], number) for attempt, number in held.items()]

    async def _run_job(self, job: Job) -> None:
        try:
            request = decode_job(job.payload)
        except ProtocolError as exc:
            logger.warning("job %d dropped: malformed: %s", job.sequence, exc)
            self._on_drop("job")
            self._ended.labels("malformed").inc()
            await _answer(job.term())
            return
        if request.attempt in self.working:
            # Delivered again while it is in progress: extending its ack deadline kept failing.
            await _answer(job.nak(delay_s=self._ack_wait_s))
            return
        trace = None if self._tracer is None else trace_job(self._tracer, request, self._now())
        if trace is not None:
            request = trace.request
        self._begin(request)
        try:
            async with running(self._extend(job), name=f"extend-{job.sequence}"):
                end = await self._runner.run(job, request, trace)
        finally:
            self._end(request.attempt)
        self._ended.labels(end.outcome).inc()
        if end.outcome == "written":
            self._written_tokens.inc(request.tokens_to_compute)
        if trace is not None:
            trace.ended(end.outcome, self._now())
        if end.outcome == "retry":
            await _answer(job.nak(delay_s=self._waits.before_retry_s(job.deliveries)))
        elif end.outcome == "left":
            delay_s = 0.0 if job.deliveries == 1 else self._waits.left_delay_s
            await _answer(job.nak(delay_s=delay_s))
        elif end.outcome in ("used_up", "malformed"):
            await _answer(job.term())
        else:
            await _answer(job.ack())

    def _begin(self, request: RemotePrefillRequest) -> None:
        if not self.working:
            self._busy_until = self._now()
        self.working[request.attempt] = request
        self.idle.clear()

    def _end(self, attempt: str) -> None:
        now = self._now()
        self._busy_s.inc(now - self._busy_until)
        self._busy_until = now
        del self.working[attempt]
        if not self.working:
            self.idle.set()

    async def _extend(self, job: Job) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            await _answer(job.extend())


async def _answer(answer: Awaitable[None]) -> None:
    """Ignores failures: without an answer the queue delivers the job again."""
    try:
        await answer
    except DynamoLiteError as exc:
        logger.warning("could not answer a job, the queue will deliver it again: %s", exc)
