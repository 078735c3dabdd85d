"""The prefill queue on JetStream: one stream, a consumer per lane, and an own connection."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from nats import errors
from nats.aio.msg import Msg
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.queue.base import MAX_AGE_S, Job, QueueConfig, QueueDepth
from dynamo_lite.disagg.queue.puller import Puller
from dynamo_lite.disagg.queue.topology import API_TIMEOUT_S, Topology, unavailable
from dynamo_lite.protocol.errors import BrokerUnavailable, QueueFull, StartupError
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 10077
_NO_SUCH_MESSAGE = (10037, 10043, 10057)


class JetStreamQueue:
    """Implements PrefillQueue, for the graph of a namespace.

    wall: seconds since the epoch.
    When the broker has lost the stream, it is created again, empty.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        config: QueueConfig | None = None,
        *,
        on_drop: OnDrop = uncounted,
        wall: Callable[[], float] = time.time,
    ):
        self._config, self._on_drop = config or QueueConfig(), on_drop
        self._connection = NatsMessaging(url)
        self._topology = Topology(namespace, self._config, self._connection, wall)
        self._resources = contextlib.AsyncExitStack()
        self._puller: Puller | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            enter, topology = stack.enter_async_context, self._topology
            await enter(self._connection)
            stack.enter_context(self._connection.watch_connection(self._on_connection))
            try:
                await retry_while_unavailable(topology.ensure)
            except BrokerUnavailable as exc:
                raise StartupError(f"JetStream cannot be used: {exc}") from exc
            puller = self._puller = Puller(self._connection.client, topology, self._job_of)
            await enter(puller)
            await enter(running(topology.keep(puller.resume), name=f"keep {topology.stream}"))
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def push(
        self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG, life_s: float = MAX_AGE_S
    ) -> int:
        with unavailable("push"):
            try:
                return await self._publish(payload, message_id, lane, life_s)
            except NoStreamResponseError:
                await self._topology.ensure()
            return await self._publish(payload, message_id, lane, life_s)

    async def _publish(self, payload: bytes, message_id: str, lane: Lane, life_s: float) -> int:
        """As `push`. Errors of nats-py pass through."""
        subject, timeout_s = self._topology.subjects[lane], self._config.push_timeout_s
        # In whole seconds. It counts in place of the stream's `max_age`.
        ttl_s = max(math.ceil(min(life_s, self._config.max_age_s)), 1)
        headers = {"Nats-Msg-Id": message_id, "Nats-TTL": f"{ttl_s}s"}
        try:
            answer = await self._topology.js().publish(
                subject, payload, timeout=timeout_s, headers=headers
            )
        except APIError as exc:
            if exc.err_code != _MAX_MESSAGES:
                raise
            raise QueueFull(f"the queue holds {self._config.max_jobs} jobs") from exc
        if not isinstance(answer.seq, int):  # nats-py does not check
            raise TypeError(f"the sequence {answer.seq!r}")
        return answer.seq

    async def delete(self, sequence: int) -> bool:
        with unavailable("delete"):
            try:
                async with asyncio.timeout(API_TIMEOUT_S):
                    return await self._topology.js().delete_msg(self._topology.stream, sequence)
            except NotFoundError:
                return False
            except APIError as exc:
                if exc.err_code in _NO_SUCH_MESSAGE:
                    return False
                raise

    async def depth(self) -> QueueDepth:
        return await self._topology.depth()

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        if self._puller is None:
            raise BrokerUnavailable("the queue is closed")
        return await self._puller.pull(timeout_s, lanes)

    async def stop_pulling(self) -> None:
        if self._puller is not None:
            await self._puller.stop()

    def _on_connection(self, connected: bool) -> None:
        if connected:
            self._topology.missing.set()
        elif self._puller is not None:
            self._puller.pause()

    def _job_of(self, message: Msg) -> Job | None:
        """None if the message is not the broker's."""
        try:
            sequence = message.metadata.sequence.stream
        except (errors.Error, ValueError, IndexError, OverflowError, OSError) as exc:
            logger.warning("dropped an unexpected message on the pull inbox: %r", exc)
            self._on_drop("job")
            return None
        return Job(message.data, sequence, partial(self._ack, sequence, message.reply))

    async def _ack(self, sequence: int, reply: str) -> None:
        with unavailable(f"job {sequence}"):
            await self._topology.client().publish(reply, b"+ACK")
