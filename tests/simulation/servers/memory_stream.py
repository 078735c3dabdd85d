"""What the in-process twin's broker holds of one queue."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_lite.protocol.queue import Lane
from dynamo_lite.queue.base import QueueConfig


@dataclass
class Entry:
    """A pulled job. timer: delivers it again when its holder neither answers nor extends."""

    sequence: int
    payload: bytes
    lane: Lane
    expires_at: float
    deliveries: int = 0
    waiting: bool = True
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class MemoryStream:
    """All state of one queue, shared by its users. number: how often it was made.

    context: in which its timers run, independent of the caller.
    """

    def __init__(self, config: QueueConfig, context: contextvars.Context):
        self.config = config
        self.number = 1
        self._context = context
        self.entries: dict[int, Entry] = {}
        self.order: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        self.message_ids: dict[str, int] = {}
        self.last_sequence = 0
        self.changed = asyncio.Event()

    def expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for entry in list(self.entries.values()):
            if entry.expires_at > now:
                break
            self.remove(entry.sequence)

    def remove(self, sequence: int) -> bool:
        entry = self.entries.pop(sequence, None)
        if entry is not None:
            entry.stop_timer()
        return entry is not None

    def lose(self) -> None:
        """Loses all jobs, and all facts about earlier jobs. Sequences continue."""
        for sequence in list(self.entries):
            self.remove(sequence)
        for order in self.order.values():
            order.clear()
        self.message_ids.clear()
        self.number += 1

    def wait_again(self, entry: Entry) -> None:
        """Redeliveries come before new jobs."""
        entry.stop_timer()
        if self.entries.get(entry.sequence) is entry and not entry.waiting:
            entry.waiting = True
            self.order[entry.lane].appendleft(entry.sequence)
            self.changed.set()

    def hold(self, entry: Entry, seconds: float) -> None:
        entry.stop_timer()
        entry.timer = asyncio.get_running_loop().call_later(
            seconds, self.wait_again, entry, context=self._context
        )

    def take(self, lanes: Sequence[Lane]) -> Entry | None:
        """The first job of the first lane that has any."""
        self.expire()
        return next((entry for lane in lanes if (entry := self._take(lane))), None)

    def _take(self, lane: Lane) -> Entry | None:
        order = self.order.get(lane, ())
        while order:
            entry = self.entries.get(order.popleft())
            if entry is None:
                continue
            entry.waiting = False
            entry.deliveries += 1
            self.hold(entry, self.config.ack_wait_s)
            return entry
        return None
