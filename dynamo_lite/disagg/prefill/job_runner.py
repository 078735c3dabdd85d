"""One delivery of a prefill job: claim and compute, write, report the outcome.

The engine computes the job while the claim is on its way (`computation.py`).
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram

from dynamo_lite.disagg.engine import AttemptOutcome, PrefillEngine
from dynamo_lite.disagg.prefill.claims import Claims, HeldGrant
from dynamo_lite.disagg.prefill.computation import Computation
from dynamo_lite.disagg.prefill.job_trace import JobTrace
from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.disagg.queue.base import Job
from dynamo_lite.protocol.codec import WIRE_VERSION
from dynamo_lite.protocol.errors import (
    BadGrant,
    BrokerUnavailable,
    DeadlineExceeded,
    ProtocolError,
    Unavailable,
)
from dynamo_lite.protocol.prefill import CancelAttempt, ClaimRefused, RemotePrefillRequest
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.permits import Permits
from dynamo_lite.transfer.directory import MetadataDirectory

logger = logging.getLogger(__name__)

#: How many written attempts are remembered, in case that the queue delivers their jobs again.
_MOST_WRITTEN = 1024


@dataclass(frozen=True)
class JobEnd:
    """How one delivery of a job ended."""

    #: As the counter shows it. Jobs with "retry" and "left" (no usable link to the engine; for
    #: other workers) go back to the queue, all others are final.
    outcome: str
    #: The reason, for the decode engine if this was the last delivery.
    why: str = ""


class JobRunner:
    """When `run` returns a final end, the decode engine knows it: it has refused the claim, or
    the outcome was reported to it. links: None if all links count as usable. permits: those that
    the engine's ranks read.
    """

    def __init__(
        self,
        *,
        engine: PrefillEngine,
        permits: Permits,
        directory: MetadataDirectory,
        claims: Claims,
        registry: CollectorRegistry,
        links: PeerLinks | None,
        clock: Clock,
    ):
        self._engine, self._directory, self._claims = engine, directory, claims
        self._permits, self._links, self._now = permits, links, clock.monotonic
        self._stages = Histogram(
            "dynamo_lite_prefill_job_stage_seconds",
            "Stages of a prefill job: claim (from its pull to the granted claim), engine (from"
            " there until the engine says that nothing is being written any more)",
            ["stage"],
            buckets=(0.0003, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        #: Attempts that were abandoned while a delivery of them runs.
        self._abandoned: set[str] = set()
        #: By attempt.
        self._computations: dict[str, Computation] = {}
        #: The last attempts that were written.
        self._written: dict[str, None] = {}
        self._engine_died = False

    async def run(self, job: Job, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        """Must not run for two deliveries of the same attempt at a time."""
        try:
            return await self._run(job, request, trace)
        finally:
            self._claims.held.pop(request.attempt, None)
            self._abandoned.discard(request.attempt)
            self._computations.pop(request.attempt, None)

    async def abandon(self, attempt: str, *, running: bool) -> None:
        """Stops a job: no write of it starts any more. Its outcome is reported as usual."""
        if running:
            # The engine may not know the attempt yet.
            self._abandoned.add(attempt)
        if (computation := self._computations.get(attempt)) is not None:
            computation.stop_writing()
        await self._engine.abandon(attempt)

    async def answer_cancel(self, cancel: CancelAttempt) -> None:
        """Reports again the end of an attempt that this worker does not have any more."""
        outcome = "died" if self._engine_died else "abandoned"
        over = AttemptOutcome(cancel.attempt, outcome, "this worker has no such job")
        await self._claims.report_end(cancel.engine_id, None, over)

    async def _run(self, job: Job, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        if request.wire_version != WIRE_VERSION:
            why = unsupported(request.wire_version)
            return await self._hand_back(request, "failed", why, "malformed")
        if request.attempt in self._written:
            # Not claimed again: the decode engine may compute with what was written, and soon use
            # its blocks for others.
            await self._report_end(request, AttemptOutcome(request.attempt, "written"))
            return JobEnd("refused", "it was written already")
        if job.deliveries_left < 0:
            end = JobEnd("retry", "its last worker died or was disconnected")
        else:
            end = await self._prefill(request, trace)
        if end.outcome not in ("retry", "left") or job.deliveries_left > 0:
            return end
        if end.outcome == "left":
            return await self._hand_back(request, "failed", end.why, "unusable")
        why = f"given up after {job.deliveries} deliveries: {end.why}"
        return await self._hand_back(request, "abandoned", why, "used_up")

    async def _prefill(self, request: RemotePrefillRequest, trace: JobTrace | None) -> JobEnd:
        """Claims the job and has it computed meanwhile, then has it written."""
        pulled = self._now()

        def cancelled() -> bool:
            return request.attempt in self._abandoned

        try:
            target = await self._directory.get(request.engine_id)
            if target is None:
                # The engine's process has ended, or the store has lost its record.
                why = "the store has no record of this engine"
                return await self._hand_back(request, "abandoned", why, "engine_gone")
            if self._links is not None and (trouble := self._links.trouble(target)):
                logger.info(
                    "request %s: attempt %s: left to other workers: %s", *_ids(request), trouble
                )
                return JobEnd("left", f"it cannot be written into: {trouble}")
            async with Computation(
                self._engine,
                self._permits,
                request,
                target,
                cancelled=cancelled,
                on_first_token=partial(self._claims.send_first_token, request),
            ) as computation:
                self._computations[request.attempt] = computation
                # The engine gets the job first, so that the claim may take as long as the
                # computation.
                await asyncio.sleep(0)
                answer = await self._claims.ask(
                    request, target.engine_id, self._now() - pulled, lambda: not cancelled()
                )
                if isinstance(answer, ClaimRefused):
                    reason = answer.reason
                    logger.info("request %s: attempt %s: refused: %s", *_ids(request), reason)
                    outcome = "retry" if answer.elsewhere else "refused"
                    return JobEnd(outcome, f"the claim was refused: {reason}")
                claimed = self._now()
                self._stages.labels("claim").observe(claimed - pulled)
                if trace is not None:
                    trace.claimed(claimed)
                ended = await self._write(request, computation, answer)
        except (DeadlineExceeded, BrokerUnavailable) as exc:
            # The claim may have been granted to this worker, and would block others: give it back.
            return await self._hand_back(request, "abandoned", str(exc), "abandoned")
        except Unavailable as exc:
            # The engine is reconnecting, or it has left; then the directory drops it soon.
            logger.warning("request %s: attempt %s: not claimed: %s", *_ids(request), exc)
            return JobEnd("retry", f"not claimed: {exc}")
        except ProtocolError as exc:
            # The engine's record or reply is malformed, or the grant is not for this claim. The
            # claim may have been granted.
            logger.warning(
                "request %s: attempt %s: engine %s: %s", *_ids(request), request.engine_id, exc
            )
            counted = "bad_grant" if isinstance(exc, BadGrant) else "malformed"
            return await self._hand_back(request, "failed", str(exc), counted)
        return await self._report_end(request, ended)

    async def _hand_back(
        self,
        request: RemotePrefillRequest,
        outcome: Literal["failed", "abandoned"],
        why: str,
        counted: str,
    ) -> JobEnd:
        """Ends a job that this worker does not write. counted: the outcome for the counter."""
        ended = AttemptOutcome(request.attempt, outcome, why)
        end = await self._report_end(request, ended)
        return end if end.outcome == "retry" else JobEnd(counted, why)

    async def _report_end(
        self,
        request: RemotePrefillRequest,
        ended: AttemptOutcome,
    ) -> JobEnd:
        """Reports the outcome to the engine. If that fails the job is delivered again."""
        if ended.outcome != "written":
            logger.warning(
                "request %s: attempt %s: %s: %s", *_ids(request), ended.outcome, ended.detail
            )
        else:
            self._written[request.attempt] = None
            if len(self._written) > _MOST_WRITTEN:
                del self._written[next(iter(self._written))]
        reported = await self._claims.report_end(request.engine_id, request.request_id, ended)
        # A written attempt is also reported by the commits of its last writes.
        if reported or ended.outcome == "written":
            return JobEnd(ended.outcome, ended.detail)
        return JobEnd(
            "retry", f"{ended.outcome}, but could not be reported to its engine: {ended.detail}"
        )

    async def _write(
        self, request: RemotePrefillRequest, computation: Computation, grant: HeldGrant
    ) -> AttemptOutcome:
        """The job is claimed: has it written, unless it was cancelled or is malformed. No write
        starts after the grant has expired, because its engine gives the attempt up."""
        claimed = self._now()
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(grant.left_s, self._expire, request, computation)
        try:
            ended = await computation.write(grant.id)
        finally:
            expiry.cancel()
        if not computation.ran:
            return ended
        self._stages.labels("engine").observe(self._now() - claimed)
        if self._links is not None and ended.outcome == "written":
            self._links.worked(request.engine_id)
        self._engine_died = self._engine_died or ended.outcome == "died"
        return ended

    def _expire(self, request: RemotePrefillRequest, computation: Computation) -> None:
        computation.stop_writing()
        self._claims.expired(request)


def _ids(request: RemotePrefillRequest) -> tuple[str, str]:
    """The two ids that log lines begin with."""
    return request.request_id, request.attempt
