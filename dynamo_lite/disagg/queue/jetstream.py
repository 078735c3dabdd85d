"""The prefill queue on JetStream: one stream, a consumer per lane, and an own connection."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Self

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.queue.base import (
    MAX_AGE_S,
    Job,
    QueueConfig,
    QueueDepth,
    QueueOptions,
)
from dynamo_lite.disagg.queue.puller import Puller
from dynamo_lite.disagg.queue.topology import (
    API_TIMEOUT_S,
    Topology,
    unavailable,
)
from dynamo_lite.protocol.errors import (
    BrokerUnavailable,
    QueueFull,
    StartupError,
)
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 10077
_NO_SUCH_MESSAGE = (10037, 10043, 10057)
_REPAIR_INTERVAL_S = 0.1


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
        self._on_drop = on_drop
        self._config = config or QueueConfig()
        self._topology = Topology(namespace, self._config, wall)
        self._connection = NatsMessaging(url)
        self._missing, self._log_limit = asyncio.Event(), LogLimit()
        self._ensuring = asyncio.Lock()
        self._resources = contextlib.AsyncExitStack()
        self._puller: Puller | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._connection)
            stack.enter_context(self._connection.watch_connection(self._on_connection))
            client = self._connection.client
            try:
                await retry_while_unavailable(self._ensure)
            except BrokerUnavailable as exc:
                raise StartupError(f"JetStream cannot be used: {exc}") from exc
            self._puller = Puller(client, self._topology, self._missing.set, self._on_drop)
            await stack.enter_async_context(self._puller)
            keeper = running(self._keep(), name=f"keep {self._topology.stream}")
            await stack.enter_async_context(keeper)
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
                await self._ensure()
            return await self._publish(payload, message_id, lane, life_s)

    async def _publish(self, payload: bytes, message_id: str, lane: Lane, life_s: float) -> int:
        """As `push`. Errors of nats-py pass through."""
        subject, timeout_s = self._topology.subject_of(lane), self._config.push_timeout_s
        # In whole seconds. It counts in place of the stream's `max_age`.
        ttl_s = max(math.ceil(min(life_s, self._config.max_age_s)), 1)
        headers = {"Nats-Msg-Id": message_id, "Nats-TTL": f"{ttl_s}s"}
        try:
            answer = await self._js().publish(subject, payload, timeout=timeout_s, headers=headers)
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
                    return await self._js().delete_msg(self._topology.stream, sequence)
            except NotFoundError:
                return False
            except APIError as exc:
                if exc.err_code in _NO_SUCH_MESSAGE:
                    return False
                raise

    async def depth(self) -> QueueDepth:
        with unavailable("depth"):
            depth = await self._topology.depth(self._connected_client())
        if depth is None:
            self._missing.set()
            raise BrokerUnavailable("the broker has lost the queue")
        return depth

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        if self._puller is None:
            raise BrokerUnavailable("the queue is closed")
        return await self._puller.pull(timeout_s, lanes)

    async def stop_pulling(self) -> None:
        if self._puller is not None:
            await self._puller.stop()

    # The broker's side of the queue

    def _on_connection(self, connected: bool) -> None:
        if connected:
            self._missing.set()
        elif self._puller is not None:
            self._puller.pause()

    async def _keep(self) -> None:
        """Creates what the broker has lost again, then resumes pulls."""
        while True:
            await self._missing.wait()
            self._missing.clear()
            try:
                await self._ensure()
            except (BrokerUnavailable, StartupError) as exc:
                text = "queue %s is unavailable, retrying: %s"
                self._log_limit.log(logger, text, self._topology.stream, exc)
                if self._connection.connected:  # otherwise the reconnect sets it
                    self._missing.set()
            else:
                assert self._puller is not None
                self._puller.resume()
            await asyncio.sleep(_REPAIR_INTERVAL_S)

    async def _ensure(self) -> None:
        async with self._ensuring:
            with unavailable("creating the queue"):
                await self._topology.ensure(self._connected_client())

    def _connected_client(self) -> Client:
        if not self._connection.connected:
            raise BrokerUnavailable("NATS is disconnected")
        return self._connection.client

    def _js(self) -> JetStreamContext:
        return self._connected_client().jetstream(timeout=API_TIMEOUT_S)


async def check_queue(messaging: NatsMessaging, namespace: str, options: QueueOptions) -> None:
    """Raises StartupError when a queue with these options could not be opened. Changes nothing.

    Problems that the broker does not report now appear when the queue is opened.
    """
    topology = Topology(namespace, QueueConfig.of(options))
    with contextlib.suppress(BrokerUnavailable), unavailable("checking the queue"):
        await topology.check(messaging.client, clustered=messaging.clustered)
