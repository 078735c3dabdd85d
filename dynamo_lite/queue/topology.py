"""The stream of a queue and its consumers, one per lane: created if absent, else checked."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
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
    ServiceUnavailableError,
)

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.queue.base import QueueConfig

_NAME_IN_USE = 10058
_DUPLICATE_WINDOW_S = 120.0
#: Longest wait for one answer of JetStream's API.
API_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Found:
    """The stream and the consumers that the broker has. Each is identified by its creation time,
    so the values change when the broker has lost them."""

    stream: Hashable
    consumers: Mapping[Lane, Hashable]


class ConsumerState(msgspec.Struct, frozen=True):
    """One consumer in the broker's answer to CONSUMER.LIST."""

    name: str
    #: When it was created; identifies it. The text of the broker: it has nanoseconds.
    created: str
    #: Jobs that were never delivered.
    num_pending: int = 0
    #: Jobs that were delivered and not answered.
    num_ack_pending: int = 0


class _ConsumerList(msgspec.Struct, frozen=True):
    """`consumers` is null in the answer of a stream without consumers."""

    consumers: list[ConsumerState] | None = None
    #: Names of consumers whose servers did not respond, in a cluster.
    missing: list[str] | None = None
    error: dict[str, Any] | None = None


_decode_list = msgspec.json.Decoder(_ConsumerList).decode


class Topology:
    """The stream and the consumers of one queue.

    The stream's metadata contains the shared settings. So the process that creates the stream
    sets them atomically, and others can detect a difference.
    wall: seconds since the epoch.
    """

    def __init__(
        self,
        stream: str,
        subject: str,
        config: QueueConfig,
        wall: Callable[[], float] = time.time,
    ):
        self.stream = stream
        self.subject = subject
        self.config = config
        self._wall = wall

    async def ensure(self, client: Client) -> "Found":
        """Idempotent. Raises StartupError if the queue exists with another configuration.

        Errors of the client pass through.
        """
        js = client.jetstream(timeout=API_TIMEOUT_S)
        stream = await self._stream(js)
        if stream is None:
            try:
                stream = await js.add_stream(self._stream_config())
            except BadRequestError as exc:
                if exc.err_code != _NAME_IN_USE:
                    raise
                stream = await js.stream_info(self.stream)
        self._check(stream.config.metadata or {})
        for lane in self.config.lanes:
            await js.add_consumer(self.stream, self._consumer_config(lane))
        consumers = await self.consumers(client)
        return Found((stream.created, stream.config.first_seq), identities(consumers))

    async def consumers(self, client: Client) -> dict[Lane, ConsumerState]:
        """The queue's consumers that the broker has; none if it does not have the stream.

        One request for all lanes. The answer has no second page: the consumers of a work queue
        have disjoint subjects, so there are no more of them than lanes. Errors of the client
        pass through; raises msgspec.DecodeError if the answer is malformed, and
        ServiceUnavailableError if the state of a consumer is unknown.
        """
        subject = f"$JS.API.CONSUMER.LIST.{self.stream}"
        answer = _decode_list((await client.request(subject, timeout=API_TIMEOUT_S)).data)
        if answer.error is not None:
            try:
                APIError.from_error(answer.error)
            except NotFoundError:
                return {}
        if answer.missing:
            raise ServiceUnavailableError(
                description=f"no state of consumers {', '.join(answer.missing)}"
            )
        by_name = {consumer.name: consumer for consumer in answer.consumers or ()}
        names = ((lane, consumer_name(lane)) for lane in self.config.lanes)
        return {lane: by_name[name] for lane, name in names if name in by_name}

    def subject_of(self, lane: Lane) -> str:
        return self.subject if lane is Lane.LONG else f"{self.subject}.{lane.value}"

    async def _stream(self, js: JetStreamContext) -> StreamInfo | None:
        try:
            return await js.stream_info(self.stream)
        except NotFoundError:
            return None

    def _check(self, found: dict[str, str]) -> None:
        wrong = [
            f"{name} is {found.get(name, 'unknown')} there and {value} here"
            for name, value in shared_settings(self.config).items()
            if found.get(name) != value
        ]
        if wrong:
            raise StartupError(mismatch_text(self.stream, wrong))

    def _stream_config(self) -> StreamConfig:
        config = self.config
        return StreamConfig(
            name=self.stream,
            subjects=[self.subject_of(lane) for lane in config.lanes],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.MEMORY,
            discard=DiscardPolicy.NEW,
            max_msgs=config.max_jobs,
            max_age=config.max_age_s,
            duplicate_window=min(_DUPLICATE_WINDOW_S, config.max_age_s),
            # A broker that lost its memory would count from 1 again, and a late
            # ack or delete of a lost job would hit a new one.
            first_seq=int(self._wall() * 1e6),
            metadata=shared_settings(config),
        )

    def _consumer_config(self, lane: Lane) -> ConsumerConfig:
        return ConsumerConfig(
            durable_name=consumer_name(lane),
            filter_subject=self.subject_of(lane),
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.config.ack_wait_s,
            # With a limit the broker would keep a used-up job in the stream, where it counts
            # against the cap. So it is delivered until a worker has reported its end to the
            # decode engine and terminated it.
            max_deliver=-1,
            max_ack_pending=-1,
        )


def identities(consumers: Mapping[Lane, ConsumerState]) -> dict[Lane, Hashable]:
    """What `Found` compares of consumers."""
    return {lane: consumer.created for lane, consumer in consumers.items()}


def consumer_name(lane: Lane) -> str:
    return "prefill_workers" if lane is Lane.LONG else f"prefill_workers_{lane.value}"


def shared_settings(config: QueueConfig) -> dict[str, str]:
    """The settings that all users of a queue must share, as text."""
    return {
        "max_depth": str(config.max_jobs),
        "ack_wait_s": f"{config.ack_wait_s:g}",
        "max_deliver": str(config.max_deliver),
        "max_age_s": f"{config.max_age_s:g}",
        "order": config.order,
        "short_length_tokens": str(config.short_length),
    }


def mismatch_text(stream: str, wrong: list[str]) -> str:
    return (
        f"the queue {stream} exists with another configuration: {', '.join(wrong)}; "
        "give every service the same queue options, or delete the stream if it is a left-over"
    )
