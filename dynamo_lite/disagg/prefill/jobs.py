"""The jobs of a prefill worker: pulled, run one after the other, acknowledged when they are over.

The queue delivers each job once. `attempt.py` runs one job.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.prefill.attempt import JobAttempt, WriterParts
from dynamo_lite.disagg.queue.base import Job, PrefillQueue
from dynamo_lite.protocol.errors import DynamoLiteError, ProtocolError, Unavailable
from dynamo_lite.protocol.prefill import decode_job

logger = logging.getLogger(__name__)

_PULL_S = 2.0
#: Until the next pull while none can bring a job that this worker could do.
_PAUSE_S = 0.25


class PrefillJobs:
    """fit: whether the engine can take a job now; while not, no job is pulled."""

    def __init__(
        self,
        parts: WriterParts,
        queue: PrefillQueue,
        registry: CollectorRegistry,
        fit: Callable[[], bool] = lambda: True,
    ):
        self._parts, self._queue, self._fit = parts, queue, fit
        self._now, self._leaving = parts.clock.monotonic, parts.leaving
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
        #: Set when the queue gets nothing more for this worker.
        self._stopped = asyncio.Event()
        #: Jobs that were pulled and are not over.
        self.working: set[JobAttempt] = set()
        #: Until when `_busy_s` is counted.
        self._busy_until = 0.0
        #: Set while `working` is empty.
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self, lanes: Sequence[Lane] = tuple(Lane)) -> None:
        """Runs one job of these lanes after the other until `stop`. For several jobs at a time
        call it several times."""
        while True:
            if not self._fit() and not self._leaving.is_set():
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                job = await self._queue.pull(timeout_s=_PULL_S, lanes=lanes)
            except Unavailable as exc:
                if self._stopped.is_set():
                    return
                logger.debug("no job pulled: %s", exc)
                await asyncio.sleep(_PAUSE_S)
                continue
            if job is not None:
                await self._run_job(job)
            elif self._stopped.is_set():
                return
            elif self._leaving.is_set():
                await self._stopped.wait()  # then the queue gives what it has

    async def stop(self) -> None:
        """The worker leaves: pulls no job any more, and renews the claims of those that it has."""
        self._leaving.set()
        try:
            await self._queue.stop_pulling()
        finally:
            self._stopped.set()

    async def _run_job(self, job: Job) -> None:
        try:
            request = decode_job(job.payload)
        except ProtocolError as exc:
            logger.warning("job %d dropped: malformed: %s", job.sequence, exc)
            self._parts.on_drop("job")
            self._ended.labels("malformed").inc()
            await _ack(job)
            return
        self._begin(attempt := JobAttempt(self._parts, request))
        try:
            outcome = await attempt.run()
        finally:
            self._end(attempt)
        self._ended.labels(outcome).inc()
        if outcome == "written":
            computed = request.num_computed_tokens
            self._written_tokens.inc(len(request.prompt_token_ids) - computed)
        await _ack(job)
        if outcome == "unusable":
            # Its engine asks again at once. Others are to get that job.
            await asyncio.sleep(_PAUSE_S)

    def _begin(self, attempt: JobAttempt) -> None:
        if not self.working:
            self._busy_until = self._now()
        self.working.add(attempt)
        self.idle.clear()

    def _end(self, attempt: JobAttempt) -> None:
        now = self._now()
        self._busy_s.inc(now - self._busy_until)
        self._busy_until = now
        self.working.remove(attempt)
        if not self.working:
            self.idle.set()


async def _ack(job: Job) -> None:
    try:
        await job.ack()
    except DynamoLiteError as exc:
        logger.warning("job %d: %s", job.sequence, exc)
