"""The worker's side: publishes its KV blocks and load, and all of its blocks on request."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.kv import (
    HASHES_PER_MESSAGE,
    KvChange,
    KvCleared,
    KvNotice,
    KvRemoved,
    KvStored,
    Load,
)
from dynamo_lite.runtime.drops import OnDrop, counted, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import all_of

logger = logging.getLogger(__name__)

#: How often the load is compared with that in the last notice.
LOAD_PERIOD_S = 0.1
#: Longest time between two notices, so that a router soon detects a missed last one.
IDLE_PERIOD_S = 1.0
#: Least time between two publications of all blocks.
ALL_PERIOD_S = 2.0


class Holdings(Protocol):
    """The KV blocks of an engine, including all changes that were reported so far."""

    @property
    def block_size_tokens(self) -> int: ...

    def held(self) -> Sequence[int]: ...


class KvPublisher:
    """`serve` takes routers' requests while its context lasts; `run` publishes until cancelled.

    load: called for each notice. holdings: None for a worker that cannot list its blocks.
    """

    def __init__(
        self,
        messaging: Messaging,
        *,
        namespace: str,
        component: str,
        lease_id: int,
        load: Callable[[], Load],
        holdings: Holdings | None = None,
        on_drop: OnDrop = uncounted,
    ):
        self._messaging, self._lease_id = messaging, lease_id
        self._subject = names.kv_subject(namespace, component)
        self._snapshots = names.kv_snapshot_subject(namespace, component, lease_id)
        self._load, self._holdings, self._on_drop = load, holdings, on_drop
        #: Number of the last notice.
        self._number = 0
        #: Changes for the next notice.
        self._pending: list[KvChange] = []
        #: The load in the last notice, and when that was published.
        self._told = Load()
        self._told_at = 0.0
        self._wake = asyncio.Event()
        #: Whether a router has asked for all blocks, and when all were published last.
        self._all_wanted = False
        self._all_at = -ALL_PERIOD_S

    def __repr__(self) -> str:
        return f"<KvPublisher {self._lease_id:x} number={self._number}>"

    def changed(self, changes: Sequence[KvChange]) -> None:
        """Publishes changes at once; those of one engine step go into one notice."""
        self._pending += changes
        self._wake.set()

    def serve(self) -> AbstractAsyncContextManager[None]:
        handler = counted(self._on_request, "kv_snapshot", self._on_drop)
        return self._messaging.serve(self._snapshots, handler)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await all_of([self._wake], LOAD_PERIOD_S)
            self._wake.clear()
            now = loop.time()
            if self._all_wanted and now >= self._all_at + ALL_PERIOD_S:
                self._pending, self._all_at, self._all_wanted = self._everything(), now, False
            is_idle = now >= self._told_at + IDLE_PERIOD_S
            if self._pending or is_idle or self._load() != self._told:
                await self._publish()

    async def _publish(self) -> None:
        """Publishes the pending changes in one notice, or in several if it would be too large."""
        pending, self._pending = self._pending, []
        while True:
            count = _fitting(pending)
            await self._send(pending[:count])
            pending = pending[count:]
            if not pending:
                return

    async def _send(self, changes: list[KvChange]) -> None:
        """The number advances even if publishing fails, so that routers detect the gap."""
        self._number += 1
        self._told, self._told_at = self._load(), asyncio.get_running_loop().time()
        notice = KvNotice(
            lease_id=self._lease_id,
            number=self._number,
            load=self._told,
            block_size_tokens=self._holdings.block_size_tokens if self._holdings else 0,
            changes=changes,
        )
        try:
            await self._messaging.publish(self._subject, encode(notice))
        except Unavailable:
            logger.debug(
                "notice %d of worker %x was not sent: NATS is disconnected",
                self._number,
                self._lease_id,
            )

    async def _on_request(self, payload: bytes) -> None:
        """Publishes all blocks, once for all routers that ask within `ALL_PERIOD_S`."""
        self._all_wanted = True

    def _everything(self) -> list[KvChange]:
        """All that the engine holds, which includes the pending changes."""
        held = self._holdings.held() if self._holdings else ()
        starts = range(0, len(held), HASHES_PER_MESSAGE)
        parts = [list(held[start : start + HASHES_PER_MESSAGE]) for start in starts]
        return [KvCleared(), *(KvStored(hashes=part) for part in parts)]


def _fitting(changes: Sequence[KvChange]) -> int:
    """How many of the first changes fit into one notice; at least one, if there are any."""
    room = HASHES_PER_MESSAGE
    for count, change in enumerate(changes):
        if isinstance(change, KvStored | KvRemoved):
            room -= len(change.hashes)
        if room < 0:
            return max(count, 1)
    return len(changes)
