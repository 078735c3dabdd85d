"""One delivery of a prefill job: claim, compute, write, and tell its decode engine how it ended."""

import logging
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram

from dynamo_lite.disagg.prefill.block_checks import check_blocks
from dynamo_lite.disagg.prefill.claims import Claims
from dynamo_lite.disagg.prefill.interfaces import JobLinks, Prefiller
from dynamo_lite.disagg.prefill.job_trace import JobTrace
from dynamo_lite.engine.base import AttemptOutcome
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    DynamoLiteError,
    ProtocolError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import CancelAttempt, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.queue.base import Job
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobEnd:
    """How one delivery of a job ended.

    outcome: as the counter shows it; "retry" and "left" (to other workers, since this one
    cannot write into the engine) go back to the queue, all others are final.
    why: for the decode engine, when no delivery follows.
    """

    outcome: str
    why: str = ""


class JobRunner:
    """Whatever ends a job, its decode engine knows when `run` returns a final end: it has
    refused the claim, or it was told. links: None where all ways are taken to be good."""

    def __init__(
        self,
        *,
        engine: Prefiller,
        directory: MetadataDirectory,
        claims: Claims,
        registry: CollectorRegistry,
        links: JobLinks | None,
        clock: Clock,
    ):
        self._engine, self._directory, self._claims = engine, directory, claims
        self._links, self._now = links, clock.monotonic
        self._stages = Histogram(
            "dynamo_lite_prefill_job_stage_seconds",
            "Stages of a prefill job: claim (from its pull to the granted claim), engine (from"
            " there until the engine says that nothing is being written any more)",
            ["stage"],
            buckets=(0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self._abandoned: set[str] = set()
        self._engine_died = False

    async def run(self, job: Job, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        """Not for two deliveries of the same attempt at a time."""
        try:
            return await self._run(job, request, trace)
        finally:
            self._claims.held.pop(request.attempt, None)
            self._abandoned.discard(request.attempt)

    async def abandon(self, attempt: str, *, running: bool) -> None:
        """Stops a job's writes soon; its end is told as ever."""
        if running:
            # The engine does not know it yet when this overtakes the answer to its claim.
            self._abandoned.add(attempt)
        await self._engine.abandon(attempt)

    async def answer_cancel(self, cancel: CancelAttempt) -> None:
        """The attempt is over here, and the message that said so was lost."""
        outcome = "died" if self._engine_died else "abandoned"
        over = AttemptOutcome(cancel.attempt, outcome, "not held here")
        await self._claims.tell_end(cancel.engine_id, None, over)

    async def _run(self, job: Job, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        if request.wire_version != WIRE_VERSION:
            why = f"wire version {request.wire_version} is not spoken here, only {WIRE_VERSION}"
            return await self._hand_back(request, "failed", why, "malformed")
        if job.deliveries_left < 0:
            end = JobEnd("retry", "its last holder died, or was cut off")
        else:
            end = await self._prefill(request, trace)
        if end.outcome not in ("retry", "left") or job.deliveries_left > 0:
            return end
        if end.outcome == "left":
            return await self._hand_back(request, "failed", end.why, "unusable")
        why = f"given up after {job.deliveries} deliveries: {end.why}"
        return await self._hand_back(request, "abandoned", why, "used_up")

    async def _prefill(self, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        """Claims, computes, writes."""
        pulled = self._now()
        try:
            target = await self._directory.get(request.engine_id)
            if target is None:
                # Its process ended, or the store has lost its record.
                why = "the store has no record of this engine"
                return await self._hand_back(request, "abandoned", why, "engine_gone")
            why_not = None if self._links is None else await self._links.usable(target)
            if why_not is not None:
                logger.info("request %s: attempt %s: left to others: %s", *_ids(request), why_not)
                return JobEnd("left", f"it cannot be written into: {why_not}")
            asked = self._now()
            refusal = await self._claims.ask(
                request, asked - pulled, lambda: request.attempt not in self._abandoned
            )
        except (DeadlineExceeded, BrokerUnavailable) as exc:
            # It may have been granted to this worker, and then no other one gets it: take it back.
            return await self._hand_back(request, "abandoned", str(exc), "abandoned")
        except Unavailable as exc:
            # Nobody there: reconnecting, or gone, which the directory will know soon.
            logger.warning("request %s: attempt %s: not claimed: %s", *_ids(request), exc)
            return JobEnd("retry", f"not claimed: {exc}")
        except ProtocolError as exc:
            # Either its record or its answer cannot be read; that one may have been a yes.
            logger.warning(
                "request %s: attempt %s: engine %s: %s", *_ids(request), request.engine_id, exc
            )
            return await self._hand_back(request, "failed", str(exc), "malformed")
        if refusal is not None:
            logger.info("request %s: attempt %s: refused: %s", *_ids(request), refusal.reason)
            outcome = "retry" if refusal.elsewhere else "refused"
            return JobEnd(outcome, f"the claim was refused: {refusal.reason}")
        claimed = self._now()
        self._stages.labels("claim").observe(claimed - pulled)
        if trace is not None:
            trace.claimed(claimed)
        ended = await self._write(request, target)
        # The engine granted it about half-way.
        return await self._tell_end(request, ended, (asked + claimed) / 2)

    async def _hand_back(
        self,
        request: RemotePrefillRequest,
        outcome: Literal["failed", "abandoned"],
        why: str,
        counted: str,
    ) -> JobEnd:
        """Ends a job that this worker does not write. counted: what the counter shows."""
        ended = AttemptOutcome(request.attempt, outcome, why)
        end = await self._tell_end(request, ended)
        return end if end.outcome == "retry" else JobEnd(counted, why)

    async def _tell_end(
        self,
        request: RemotePrefillRequest,
        ended: AttemptOutcome,
        granted: float | None = None,
    ) -> JobEnd:
        """Tells the engine. A job whose end cannot be told comes again, and is told then."""
        if ended.outcome != "written":
            logger.warning(
                "request %s: attempt %s: %s: %s", *_ids(request), ended.outcome, ended.detail
            )
        told = await self._claims.tell_end(request.engine_id, request.request_id, ended, granted)
        # The notices that travel with the last write say the same of a written one.
        if told or ended.outcome == "written":
            return JobEnd(ended.outcome, ended.detail)
        return JobEnd("retry", f"{ended.outcome}, but its engine could not be told: {ended.detail}")

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


def _ids(request: RemotePrefillRequest) -> tuple[str, str]:
    """For the log."""
    return request.request_id, request.attempt
