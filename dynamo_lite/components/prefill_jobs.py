"""The jobs that a prefill worker holds, from the pull to the one answer.

A job is acknowledged when it is over: written, refused at its claim, expired,
or handed back to the decode engine as failed. A worker that dies leaves it
unacknowledged, and the queue delivers it again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.components.job_blocks import check_blocks
from dynamo_lite.components.job_seams import JobLinks, Prefiller
from dynamo_lite.components.job_trace import JobTrace, trace_job
from dynamo_lite.engine.base import AttemptOutcome
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode_sealed
from dynamo_lite.protocol.demand import Lane
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    ProtocolError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    RemotePrefillRequest,
    WriterDone,
    decode_cancel_attempt,
    decode_claim_reply,
    decode_job,
)
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.queue.base import Job, PrefillQueue
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)

_PULL_S = 2.0
_CLAIM_S = 2.0
_RETRY_DELAY_S = 0.5
_BROKER_PAUSE_S = 0.2
_UNFIT_PAUSE_S = 0.2
#: Hosts' clocks may differ by this much; the claim is judged by the engine's own.
_CLOCK_SKEW_S = 5.0


class PrefillJobs:
    """working: attempt -> job, of what was pulled and is not over. idle: nothing is.

    fit: whether the engine can take a job; meanwhile others shall. links: the ways to
    decode engines, None where all are taken to be good. tracer: None where nothing is traced.
    """

    def __init__(
        self,
        *,
        namespace: str,
        lease_id: int,
        ack_wait_s: float,
        queue: PrefillQueue,
        engine: Prefiller,
        directory: MetadataDirectory,
        messaging: Messaging,
        registry: CollectorRegistry,
        fit: Callable[[], bool] = lambda: True,
        links: JobLinks | None = None,
        clock: Clock = SYSTEM_CLOCK,
        on_drop: OnDrop = uncounted,
        tracer: Tracer | None = None,
    ):
        self._tracer = tracer
        self._time, self._now = clock.wall, clock.monotonic
        self._namespace, self._lease_id, self._ack_wait_s = namespace, lease_id, ack_wait_s
        self._queue, self._engine, self._fit, self._links = queue, engine, fit, links
        self._directory, self._messaging, self._on_drop = directory, messaging, on_drop
        self._ended = Counter(
            "dynamo_lite_prefill_jobs",
            "Prefill jobs pulled, by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._stages = Histogram(
            "dynamo_lite_prefill_job_stage_seconds",
            "Stages of a prefill job: claim (from its pull to the granted claim), engine (from"
            " there until the engine says that nothing is being written any more)",
            ["stage"],
            buckets=(0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self._pulling = True
        self._claims = 0
        self.working: dict[str, RemotePrefillRequest] = {}
        self._abandoned: set[str] = set()
        self._engine_died = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self, lanes: Sequence[Lane] = tuple(Lane)) -> None:
        """One job of these lanes after the other, until `stop`. Run several for several at a
        time."""
        while self._pulling:
            if not self._fit():
                await asyncio.sleep(_UNFIT_PAUSE_S)
                continue
            try:
                job = await self._queue.pull(timeout_s=_PULL_S, lanes=lanes)
            except Unavailable as exc:
                logger.debug("no job pulled: %s", exc)
                await asyncio.sleep(_BROKER_PAUSE_S)
                continue
            if job is not None:
                await self._do(job)

    async def stop(self) -> None:
        """Pulls nothing more; what was pulled goes on."""
        self._pulling = False
        await self._queue.stop_pulling()

    async def on_cancel(self, payload: bytes) -> None:
        cancel = decode_cancel_attempt(payload)
        if cancel.attempt in self.working:
            await self.abandon(cancel.attempt)
        else:
            # It is over here, and the word of that was lost.
            outcome = "died" if self._engine_died else "abandoned"
            over = AttemptOutcome(cancel.attempt, outcome, "not held here")
            await self._say_done(cancel.engine_id, None, over, self._claims)

    async def abandon(self, attempt: str) -> None:
        """Stops a job's writes soon; its end is told as ever."""
        if attempt in self.working:
            # The engine does not know it yet when this overtakes the answer to its claim.
            self._abandoned.add(attempt)
        await self._engine.abandon(attempt)

    async def _do(self, job: Job) -> None:
        try:
            request = decode_job(job.payload)
            if request.wire_version != WIRE_VERSION:
                raise ProtocolError(f"wire version {request.wire_version} is not spoken")
        except ProtocolError as exc:
            logger.warning("job %d dropped: %s", job.sequence, exc)
            self._on_drop("job")
            self._ended.labels("malformed").inc()
            await _answer(job.term())
            return
        if request.attempt in self.working:
            # Delivered again while it is being worked on: extending it failed for long.
            await _answer(job.nak(delay_s=self._ack_wait_s))
            return
        trace = None if self._tracer is None else trace_job(self._tracer, request, self._now())
        if trace is not None:
            request = trace.request
        self.working[request.attempt] = request
        self.idle.clear()
        keeper = asyncio.create_task(self._extend(job), name=f"extend-{job.sequence}")
        try:
            outcome = await self._prefill(request, trace)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            del self.working[request.attempt]
            self._abandoned.discard(request.attempt)
            if not self.working:
                self.idle.set()
        self._ended.labels(outcome).inc()
        if trace is not None:
            trace.ended(outcome, self._now())
        await _answer(job.nak(delay_s=_RETRY_DELAY_S) if outcome == "retry" else job.ack())

    async def _extend(self, job: Job) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            await _answer(job.extend())

    async def _prefill(self, request: RemotePrefillRequest, trace: JobTrace | None) -> str:
        """Claims, computes, writes. Returns the outcome that the counter shows."""
        pulled = self._now()
        self._claims = number = self._claims + 1
        if self._time() >= request.deadline + _CLOCK_SKEW_S:
            return "expired"
        try:
            target = await self._directory.get(request.engine_id)
            if target is None:
                return "engine_gone"
            why_not = None if self._links is None else await self._links.usable(target)
            asked = self._now()
            refusal = await self._claim(request, asked - pulled, number)
        except Unavailable as exc:
            # Nobody there: reconnecting, or gone, which the directory will know soon.
            logger.warning("request %s: attempt %s: not claimed: %s", *_ids(request), exc)
            return "retry"
        except DeadlineExceeded as exc:
            # It may have been granted: take it back.
            over = AttemptOutcome(request.attempt, "abandoned", str(exc))
            await self._say_done(request.engine_id, request.request_id, over, number)
            return "abandoned"
        except ProtocolError as exc:
            # Either its record or its answer cannot be read; that one may have been a yes.
            logger.warning(
                "request %s: attempt %s: engine %s: %s", *_ids(request), request.engine_id, exc
            )
            over = AttemptOutcome(request.attempt, "failed", str(exc))
            await self._say_done(request.engine_id, request.request_id, over, number)
            return "malformed"
        if refusal is not None:
            logger.info("request %s: attempt %s: refused: %s", *_ids(request), refusal.reason)
            return "retry" if refusal.elsewhere else "refused"
        claimed = self._now()
        self._stages.labels("claim").observe(claimed - pulled)
        if trace is not None:
            trace.claimed(claimed)
        if why_not is None:
            ended = await self._write(request, target)
        else:
            detail = f"it cannot be written into: {why_not}"
            ended = AttemptOutcome(request.attempt, "failed", detail)
        if ended.outcome != "written":
            logger.warning(
                "request %s: attempt %s: %s: %s", *_ids(request), ended.outcome, ended.detail
            )
        # The engine granted it about half-way.
        granted = (asked + claimed) / 2
        await self._say_done(request.engine_id, request.request_id, ended, number, granted)
        return ended.outcome

    async def _claim(
        self, request: RemotePrefillRequest, held_s: float, number: int
    ) -> ClaimRefused | None:
        """None when granted. Raises Unavailable, DeadlineExceeded, ProtocolError."""
        reply = await self._messaging.request(
            names.claim_subject(self._namespace, request.engine_id),
            encode_sealed(
                Claim(
                    attempt=request.attempt,
                    writer_lease_id=self._lease_id,
                    held_s=held_s,
                    number=number,
                )
            ),
            timeout_s=_CLAIM_S,
        )
        try:
            answer = decode_claim_reply(reply)
        except ProtocolError:
            self._on_drop("claim_reply")
            raise
        return answer if isinstance(answer, ClaimRefused) else None

    async def _write(self, request: RemotePrefillRequest, target: EngineMetadata) -> AttemptOutcome:
        """The claimed job, unless it was cancelled or cannot be done."""
        if request.attempt in self._abandoned:
            return AttemptOutcome(request.attempt, "abandoned", "cancelled before it began")
        claimed = self._now()
        try:
            check_blocks(request, target)
            ended = await self._engine.prefill(request, target)
        except DynamoLiteError as exc:
            return AttemptOutcome(request.attempt, "failed", str(exc))
        self._stages.labels("engine").observe(self._now() - claimed)
        if self._links is not None and ended.outcome == "failed":
            self._links.doubt(request.engine_id)
        self._engine_died = self._engine_died or ended.outcome == "died"
        return ended

    async def _say_done(
        self,
        engine_id: str,
        request_id: str | None,
        ended: AttemptOutcome,
        number: int,
        granted: float | None = None,
    ) -> None:
        """From here on no write of this attempt by claims up to `number` comes from this worker.

        request_id: where it is known, for the log. granted: when its claim was.
        """
        took_s = None
        if granted is not None and ended.written_at is not None:
            took_s = max(0.0, ended.written_at - granted)
        done = msgspec.structs.replace(
            msgspec.convert(ended, WriterDone, from_attributes=True),
            writer_lease_id=self._lease_id,
            took_s=took_s,
            number=number,
        )
        subject = names.writer_done_subject(self._namespace, engine_id)
        try:
            await self._messaging.publish(subject, encode_sealed(done))
        except Unavailable as exc:
            # The decode engine keeps the blocks back, and asks again.
            about = request_id, ended.attempt, exc
            logger.warning("request %s: attempt %s: its end is not told: %s", *about)


def _ids(request: RemotePrefillRequest) -> tuple[str, str]:
    """For the log."""
    return request.request_id, request.attempt


async def _answer(answer: Awaitable[None]) -> None:
    """An answer that cannot be given is the same as a dead worker's: redelivery."""
    try:
        await answer
    except DynamoLiteError as exc:
        logger.warning("job not answered: %s", exc)
