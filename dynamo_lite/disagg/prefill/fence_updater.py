"""Extends the fence: the deadline until which a prefill worker's engine may write.

While the worker serves, the fence is open as long as its lease certainly lives. A worker
that is leaving finishes its claimed jobs after its keys are gone: it promises each decode
engine to stay for a few seconds at a time, and its engine writes only until the end of the
last promise that all of them accepted. If they never do, it writes until the lease would have
ended by itself.
"""

import asyncio
import contextlib
import logging

from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, ProtocolError, Unavailable
from dynamo_lite.protocol.prefill import (
    RemotePrefillRequest,
    StayRefused,
    WriterStays,
    decode_stay_reply,
)
from dynamo_lite.runtime.fence import Fence
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

_PROMISE_S = 3.0


class FenceUpdater:
    """Runs `keep` for the whole life of a prefill worker. promise_s: for how long it promises at a
    time, while it leaves, that it stays."""

    def __init__(self, host: Host, fence: Fence, *, promise_s: float = _PROMISE_S):
        self._promise_s = promise_s
        self._host, self._fence, self._now = host, fence, host.clock.boottime
        self._open_until = 0.0
        #: Set by the worker when it begins to leave.
        self.leaving = asyncio.Event()
        #: Set by `keep` when the fence is closed for good.
        self.closed = asyncio.Event()
        #: Set by the worker before it pulls jobs.
        self.jobs: PrefillJobs | None = None

    async def keep(self) -> None:
        lease = self._host.lease
        while lease.loss is None and not self.leaving.is_set():
            if 0.0 < self._open_until <= self._now():
                # This event loop has stalled for the lease's time-to-live. The lease's thread has
                # kept the lease, but decode engines may have treated this worker as dead.
                for request, _ in self._claimed():
                    await self._abandon(request, "this worker's event loop stalled for too long")
            self._open(self._now() + lease.remaining_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease.ttl_s / 10):
                    await self.leaving.wait()
        # Without a promise in time a decode engine releases the blocks. Later writes would land in
        # other requests' blocks, even if the next promise arrives.
        while lease.loss is not LeaseLoss.EXPIRED and self._now() < self._open_until:
            asked_at = self._now()
            accepted = await asyncio.gather(*(self._promise(*claim) for claim in self._claimed()))
            if all(accepted) and self._now() < self._open_until:
                self._open(asked_at + self._promise_s)
            await asyncio.sleep(self._promise_s / 6)
        self._fence.open_until(0.0)
        self.closed.set()

    def _open(self, until: float) -> None:
        self._fence.open_until(until)
        self._open_until = until

    def _claimed(self) -> list[tuple[RemotePrefillRequest, int]]:
        """Only claimed jobs are written. Decode engines grant no new claims to a worker that has
        left."""
        return [] if self.jobs is None else self.jobs.claimed

    async def _promise(self, request: RemotePrefillRequest, number: int) -> bool:
        """Returns whether the decode engine accepted the promise; if not, abandons the attempt.

        Its blocks may hold other requests' KV by then, so only an acceptance counts. Engines
        before wire version 5 give every attempt the same empty reply, which is no acceptance.
        """
        stays = WriterStays(
            attempt=request.attempt,
            writer_lease_id=self._host.lease.id,
            for_s=self._promise_s,
            number=number,
        )
        subject = names.writer_stays_subject(self._host.spec.namespace, request.engine_id)
        try:
            reply = await self._host.messaging.request(
                subject, encode(stays), timeout_s=self._promise_s / 6
            )
            answer = decode_stay_reply(reply)
        except (Unavailable, DeadlineExceeded, ProtocolError) as exc:
            why = str(exc)
        else:
            if not isinstance(answer, StayRefused):
                return True
            why = answer.reason
        await self._abandon(request, f"its engine did not accept the promise: {why}")
        return False

    async def _abandon(self, request: RemotePrefillRequest, why: str) -> None:
        what = f"request {request.request_id}: attempt {request.attempt}"
        logger.warning("%s: abandoned: %s", what, why)
        if self.jobs is not None:
            await self.jobs.abandon(request.attempt)
