"""The prefill queue's in-process twin: a broker in memory, with outages on demand."""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from dynamo_lite.disagg.decision.lanes import Lane, LaneTurns
from dynamo_lite.disagg.queue.base import MAX_AGE_S, Job, QueueConfig, QueueDepth
from dynamo_lite.protocol.errors import BrokerUnavailable, QueueFull, StartupError


@dataclass
class Entry:
    """A job."""

    sequence: int
    payload: bytes
    lane: Lane
    expires_at: float


class MemoryStream:
    """All state of one queue, shared by its users."""

    def __init__(self, config: QueueConfig):
        self.config = config
        self.entries: dict[int, Entry] = {}
        self.order: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self.message_ids: dict[str, int] = {}
        self.last_sequence = 0
        self.changed = asyncio.Event()

    def expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry in [each for each in self.entries.values() if each.expires_at <= now]:
            self.remove(entry.sequence)

    def remove(self, sequence: int) -> bool:
        return self.entries.pop(sequence, None) is not None

    def lose(self) -> None:
        """Loses all jobs, and all facts about earlier jobs. Sequences continue."""
        for sequence in list(self.entries):
            self.remove(sequence)
        for order in self.order.values():
            order.clear()
        self.message_ids.clear()

    def take(self, lanes: Sequence[Lane]) -> Entry | None:
        """The first job of the first lane that has any."""
        self.expire()
        return next((entry for lane in lanes if (entry := self._take(lane))), None)

    def _take(self, lane: Lane) -> Entry | None:
        order = self.order.get(lane, ())
        while order:
            if (entry := self.entries.get(order.popleft())) is not None:
                return entry
        return None


class MemoryBroker:
    """The streams of one event loop; queues that share it share their jobs."""

    def __init__(self) -> None:
        self.connected = True
        self._streams: dict[str, MemoryStream] = {}

    def set_connected(self, connected: bool) -> None:
        """False: calls raise BrokerUnavailable, pulls get nothing."""
        self.connected = connected
        for stream in self._streams.values():
            stream.changed.set()

    def lose(self) -> None:
        """Loses all queues, as a NATS server that is restarted."""
        for stream in self._streams.values():
            stream.lose()

    def check_connected(self) -> None:
        if not self.connected:
            raise BrokerUnavailable("the memory broker is disconnected")

    def stream(self, name: str, config: QueueConfig) -> MemoryStream:
        """Raises StartupError when the stream has another configuration."""
        stream = self._streams.setdefault(name, MemoryStream(config))
        if _shared(stream.config) != _shared(config):
            raise StartupError(
                f"the queue {name} exists with another configuration: "
                f"{stream.config} there and {config} here"
            )
        return stream


def _shared(config: QueueConfig) -> QueueConfig:
    return replace(config, push_timeout_s=0.0)


class MemoryQueue:
    """Implements PrefillQueue."""

    def __init__(
        self,
        broker: MemoryBroker,
        *,
        stream: str,
        subject: str,
        config: QueueConfig | None = None,
    ):
        self._broker = broker
        self._name = stream
        self._config = config or QueueConfig()
        self._stream = MemoryStream(self._config)
        self._turns = LaneTurns()
        self._stopped = False

    async def __aenter__(self) -> Self:
        self._stream = self._broker.stream(self._name, self._config)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_pulling()

    async def push(
        self, payload: bytes, *, message_id: str, lane: Lane = Lane.LONG, life_s: float = MAX_AGE_S
    ) -> int:
        self._broker.check_connected()
        stream = self._stream
        stream.expire()
        if (known := stream.message_ids.get(message_id)) is not None:
            return known
        if len(stream.entries) >= self._config.max_jobs:
            raise QueueFull(f"the queue holds {self._config.max_jobs} jobs")
        stream.last_sequence += 1
        sequence = stream.message_ids[message_id] = stream.last_sequence
        expires_at = asyncio.get_running_loop().time() + min(
            max(math.ceil(life_s), 1), self._config.max_age_s
        )
        stream.entries[sequence] = Entry(sequence, payload, lane, expires_at)
        stream.order[lane].append(sequence)
        stream.changed.set()
        return sequence

    async def delete(self, sequence: int) -> bool:
        self._broker.check_connected()
        self._stream.expire()
        return self._stream.remove(sequence)

    async def depth(self) -> QueueDepth:
        self._broker.check_connected()
        self._stream.expire()
        entries = self._stream.entries.values()
        size = sum(len(entry.payload) for entry in entries)
        return QueueDepth(len(entries), size)

    async def pull(self, *, timeout_s: float, lanes: Sequence[Lane] = tuple(Lane)) -> Job | None:
        order = self._turns.order(lanes)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._stopped:
                    if self._broker.connected and (entry := self._stream.take(order)) is not None:
                        self._turns.took(entry.lane, order)
                        ack = partial(self._ack, entry.sequence)
                        return Job(entry.payload, entry.sequence, ack)
                    self._stream.changed.clear()
                    await self._stream.changed.wait()
        except TimeoutError:
            pass
        return None

    async def _ack(self, sequence: int) -> None:
        self._broker.check_connected()
        self._stream.remove(sequence)

    async def stop_pulling(self) -> None:
        self._stopped = True
        self._stream.changed.set()
