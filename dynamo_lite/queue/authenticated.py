"""A prefill queue whose jobs are authenticated with the graph's secret."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Self

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import BrokerUnavailable, ProtocolError
from dynamo_lite.queue.base import Job, PrefillQueue, QueueDepth
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.secret import GraphSecret

logger = logging.getLogger(__name__)


class AuthenticatedQueue:
    """Implements PrefillQueue on another one, which it opens and closes.

    subject: the queue's subject, to which each job is bound: the queue of another namespace
    rejects it. A job that is not authentic is removed from the queue, and counted as
    `unauthentic`.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        secret: GraphSecret,
        subject: str,
        on_drop: OnDrop = uncounted,
    ):
        self._queue, self._secret, self._on_drop = queue, secret, on_drop
        self._context = job_context(subject)
        self._log_limit = LogLimit()

    async def __aenter__(self) -> Self:
        await self._queue.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._queue.__aexit__(*exc_info)

    @property
    def incarnation(self) -> int:
        return self._queue.incarnation

    def on_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        return self._queue.on_lost(callback)

    async def push(self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG) -> int:
        protected = self._secret.protect(self._context, payload)
        return await self._queue.push(protected, message_id=message_id, lane=lane)

    async def delete(self, sequence: int) -> bool:
        return await self._queue.delete(sequence)

    async def depth(self) -> QueueDepth:
        return await self._queue.depth()

    def heard(self, identity: str) -> None:
        self._queue.heard(identity)

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            left_s = max(0.0, until - loop.time())
            job = await self._queue.pull(timeout_s=left_s, lanes=lanes)
            if job is None:
                return None
            try:
                payload = self._secret.open(self._context, job.payload)
            except ProtocolError as exc:
                self._on_drop("unauthentic")
                if (more := self._log_limit.allow()) is not None:
                    logger.warning(
                        "removed job %d (and %d before it) from the queue: %s",
                        job.sequence,
                        more,
                        exc,
                    )
                with contextlib.suppress(BrokerUnavailable):  # it is delivered again
                    await job.term()
            else:
                return _OpenedJob(job, payload)

    async def stop_pulling(self) -> None:
        await self._queue.stop_pulling()


def job_context(subject: str) -> bytes:
    """The context for the tag of a job on this subject."""
    return b"message " + subject.encode()


class _OpenedJob:
    """Implements Job: another one with its payload opened."""

    def __init__(self, job: Job, payload: bytes):
        self._job, self.payload = job, payload

    def __repr__(self) -> str:
        return repr(self._job)

    @property
    def sequence(self) -> int:
        return self._job.sequence

    @property
    def deliveries(self) -> int:
        return self._job.deliveries

    @property
    def deliveries_left(self) -> int:
        return self._job.deliveries_left

    async def ack(self) -> None:
        await self._job.ack()

    async def nak(self, *, delay_s: float = 0.0) -> None:
        await self._job.nak(delay_s=delay_s)

    async def term(self) -> None:
        await self._job.term()

    async def extend(self) -> None:
        await self._job.extend()
