"""The stream of a queue and its consumers, one per lane: created if absent, else checked.

What the broker has lost is created again, empty.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import (
    APIError,
    BadRequestError,
    NotFoundError,
)

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.queue.base import (
    QueueConfig,
    QueueDepth,
    QueueOptions,
    single_server_text,
)
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, DynamoLiteError, StartupError
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.nats.messaging import NatsMessaging

logger = logging.getLogger(__name__)

_NAME_IN_USE = 10058
_NOT_CLUSTERED = 10074
_NO_PEERS = 10005
_DUPLICATE_WINDOW_S = 120.0
#: Timeout of one request to JetStream's API.
API_TIMEOUT_S = 2.0
_REPAIR_INTERVAL_S = 0.1


@contextlib.contextmanager
def unavailable(what: str) -> Iterator[None]:
    """Raises BrokerUnavailable instead of what nats-py raises, for code that only requests and
    reads answers. nats-py does not check these, so that is any error."""
    try:
        yield
    except DynamoLiteError:
        raise
    except Exception as exc:
        raise BrokerUnavailable(f"{what}: {str(exc) or type(exc).__name__}") from exc


class Topology:
    """The stream and the consumers of a graph's queue: makes them, and makes lost ones again.

    The stream's metadata contains the shared settings. So the process that creates the stream
    sets them atomically, and others can detect a difference.
    connection: opened and closed by the caller. wall: seconds since the epoch.
    """

    def __init__(
        self,
        namespace: str,
        config: QueueConfig,
        connection: NatsMessaging,
        wall: Callable[[], float] = time.time,
    ):
        self.stream = names.prefill_stream(namespace)
        subject = names.prefill_jobs_subject(namespace)
        self.subjects = {lane: f"{subject}.{lane.value}" for lane in Lane}
        self.subjects[Lane.LONG] = subject
        self.config, self._connection, self._wall = config, connection, wall
        #: Set when the broker may have lost the stream or a consumer.
        self.missing = asyncio.Event()
        self._ensuring, self._log_limit = asyncio.Lock(), LogLimit()

    def client(self) -> Client:
        """Raises BrokerUnavailable."""
        if not self._connection.connected:
            raise BrokerUnavailable("NATS is disconnected")
        return self._connection.client

    def js(self) -> JetStreamContext:
        """Raises BrokerUnavailable."""
        return self.client().jetstream(timeout=API_TIMEOUT_S)

    async def ensure(self) -> None:
        """Creates or checks stream and consumers; idempotent.

        Raises BrokerUnavailable, or StartupError if the queue exists with another configuration, or
        needs a cluster.
        """
        async with self._ensuring:
            with unavailable("creating the queue"):
                js = self.js()
                stream = await self._stream(js) or await self._create(js)
                self._check(stream.config)
                if (stream.config.num_replicas or 1) < self.config.replicas:
                    await self._replicate(js, stream.config)
                for lane in Lane:
                    await js.add_consumer(self.stream, self._consumer_config(lane))

    async def keep(self, on_there: Callable[[], None]) -> None:
        """Creates what is missing again, each time. on_there: called when all of it is there."""
        while True:
            await self.missing.wait()
            self.missing.clear()
            try:
                await self.ensure()
            except (BrokerUnavailable, StartupError) as exc:
                text = "queue %s is unavailable, retrying: %s"
                self._log_limit.log(logger, text, self.stream, exc)
                if self._connection.connected:  # otherwise the reconnect sets it
                    self.missing.set()
            else:
                on_there()
            await asyncio.sleep(_REPAIR_INTERVAL_S)

    async def depth(self) -> QueueDepth:
        """Raises BrokerUnavailable."""
        with unavailable("depth"):
            stream = await self._stream(self.js())
            if stream is not None:
                return QueueDepth(_number(stream.state.messages), _number(stream.state.bytes))
        self.missing.set()
        raise BrokerUnavailable("the broker has lost the queue")

    async def check(self) -> None:
        """Raises StartupError if `ensure` would, or BrokerUnavailable; changes nothing."""
        with unavailable("checking the queue"):
            if self.config.replicas > 1 and not self._connection.clustered:
                raise StartupError(single_server_text(self.config.replicas))
            stream = await self._stream(self.js())
            if stream is not None:
                self._check(stream.config)

    async def _stream(self, js: JetStreamContext) -> StreamInfo | None:
        try:
            return await js.stream_info(self.stream)
        except NotFoundError:
            return None

    async def _create(self, js: JetStreamContext) -> StreamInfo:
        try:
            with self._placement():
                return await js.add_stream(self._stream_config())
        except BadRequestError as exc:
            if exc.err_code != _NAME_IN_USE:
                raise
            return await js.stream_info(self.stream)

    async def _replicate(self, js: JetStreamContext, found: StreamConfig) -> None:
        """Adds replicas to a stream that has too few; its jobs stay."""
        wanted = self.config.replicas
        with self._placement():
            await js.update_stream(dataclasses.replace(found, num_replicas=wanted))
        before = found.num_replicas or 1
        logger.info("replicas of the queue %s: %d before, %d now", self.stream, before, wanted)

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        """Turns JetStream's errors into errors that say what is missing to place the replicas."""
        wanted = self.config.replicas
        try:
            yield
        except APIError as exc:
            if exc.err_code == _NOT_CLUSTERED:
                raise StartupError(single_server_text(wanted)) from exc
            if exc.err_code != _NO_PEERS:
                raise
            raise BrokerUnavailable(
                f"the NATS cluster has no {wanted} servers with JetStream that are up for the"
                f" queue {self.stream}: {exc.description}; start them, or lower queue.replicas"
            ) from exc

    def _check(self, stream: StreamConfig) -> None:
        found = {**(stream.metadata or {}), "storage": stream.storage or ""}
        expected = {**shared_settings(self.config), "storage": self.config.storage}
        wrong = [
            f"{name} is {found.get(name, 'unknown')} there and {value} here"
            for name, value in expected.items()
            if found.get(name) != value
        ]
        if wrong:
            raise StartupError(
                f"the queue {self.stream} exists with another configuration: {', '.join(wrong)};"
                " give every service the same queue options, or delete the stream if it is a"
                " left-over"
            )

    def _stream_config(self) -> StreamConfig:
        config = self.config
        return StreamConfig(
            name=self.stream,
            subjects=list(self.subjects.values()),
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType(config.storage),
            num_replicas=config.replicas,
            discard=DiscardPolicy.NEW,
            max_msgs=config.max_jobs,
            max_age=config.max_age_s,
            allow_msg_ttl=True,
            duplicate_window=min(_DUPLICATE_WINDOW_S, config.max_age_s),
            # A broker that lost its memory would count from 1 again, and the end of a lost job
            # would hit a new one.
            first_seq=int(self._wall() * 1e6),
            metadata=shared_settings(config),
        )

    def _consumer_config(self, lane: Lane) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=consumer_name(lane),
            filter_subject=self.subjects[lane],
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            # Jobs are delivered once, and count until they are acknowledged or deleted.
            # Longer than a job's life: after it the job would not count any more, and stay.
            ack_wait=2 * self.config.max_age_s,
            max_deliver=1,
            max_ack_pending=-1,
        )


def _number(found: object) -> int:
    """nats-py takes any type."""
    if not isinstance(found, int):
        raise TypeError(f"{found!r} in the state of a stream")
    return found


def consumer_name(lane: Lane) -> str:
    return "prefill_workers" if lane is Lane.LONG else f"prefill_workers_{lane.value}"


def shared_settings(config: QueueConfig) -> dict[str, str]:
    """The settings that all users of a queue must share, as text; JetStream's configuration has
    the others."""
    return {
        "max_depth": str(config.max_jobs),
        "deliveries": "once",
        "max_age_s": f"{config.max_age_s:g}",
        # How its lanes are served: a queue of another release may have a single one.
        "order": "short-first",
        "short_length_tokens": str(config.short_length),
    }


async def check_queue(messaging: NatsMessaging, namespace: str, options: QueueOptions) -> None:
    """Raises StartupError when a queue with these options could not be opened. Changes nothing.

    Problems that the broker does not report now appear when the queue is opened.
    """
    with contextlib.suppress(BrokerUnavailable):
        await Topology(namespace, QueueConfig.of(options), messaging).check()
