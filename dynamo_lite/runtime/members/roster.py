"""A live view of the members that are registered under a prefix of the store."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from typing import Self

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.names import endpoint_key
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.versions import misfit
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listeners import Listeners
from dynamo_lite.runtime.store import Delete, Snapshot, Store, WatchEvent, changes, following
from dynamo_lite.runtime.tasks import OnFailure, log_failure

logger = logging.getLogger(__name__)

Members = tuple[EndpointRecord, ...]

#: Takes the lease ids that have joined and those that have left.
OnChange = Callable[[frozenset[int], frozenset[int]], None]

#: How long members are kept that are missing after a reconnect: the store may have lost its data.
#: Processes put their keys back as soon as they detect that.
_RETURN_S = 5.0


class Roster:
    """Async context manager; entering it waits for the first listing.

    Malformed records, records at a key of another member, and members whose version does not fit
    are logged, counted and skipped.
    While the store is unavailable the last known members stay, and for some seconds afterwards, in
    which they put their keys back if the store has lost its data.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        on_drop: OnDrop = uncounted,
        on_failure: OnFailure = log_failure,
    ):
        self._store = store
        self._on_failure = on_failure
        self._on_drop = on_drop
        self._prefix = prefix
        self._records: dict[str, EndpointRecord] = {}
        #: Keys of `_records` that the store has lost: each is removed unless it comes back.
        self._lost: dict[str, asyncio.TimerHandle] = {}
        self._members: Members = ()
        self._by_lease: dict[int, EndpointRecord] = {}
        self._listeners = Listeners[frozenset[int], frozenset[int]](prefix)
        self._stack = contextlib.AsyncExitStack()

    @property
    def members(self) -> Members:
        """Sorted by key."""
        return self._members

    @property
    def lease_ids(self) -> Set[int]:
        return self._by_lease.keys()

    def get(self, lease_id: int) -> EndpointRecord | None:
        return self._by_lease.get(lease_id)

    def on_change(self, callback: OnChange) -> AbstractContextManager[object]:
        """Calls `callback` in the event loop after each join or leave, with `members` updated,
        until the returned context is left."""
        return self._listeners.add(callback)

    async def __aenter__(self) -> Self:
        """Raises StoreUnavailable when the first listing does not come in time."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._forget_lost)
            follower = following(self._store, self._prefix, self._apply, self._on_failure)
            await stack.enter_async_context(follower)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _apply(self, event: WatchEvent) -> None:
        loop = asyncio.get_running_loop()
        for key, value in changes(event, self._records).items():
            if value is None and isinstance(event, Snapshot):
                if key not in self._lost:
                    self._lost[key] = loop.call_later(_RETURN_S, self._apply, Delete(key))
                continue
            if (timer := self._lost.pop(key, None)) is not None:
                timer.cancel()
            record = None if value is None else self._parse(key, value)
            if record is None:
                self._records.pop(key, None)
            else:
                self._records[key] = record
        self._publish()

    def _parse(self, key: str, value: bytes) -> EndpointRecord | None:
        try:
            record = decode_json(value, EndpointRecord)
            names = record.namespace, record.component, record.endpoint
            if key != endpoint_key(*names, record.lease_id):
                raise ProtocolError("its key does not match its content")
        except ProtocolError as exc:
            logger.warning("skipped the malformed record at %s: %s", key, exc)
            self._on_drop("record")
            return None
        if why := misfit(record):
            logger.warning("skipped the member at %s: %s", key, why)
            self._on_drop("version")
            return None
        return record

    def _forget_lost(self) -> None:
        for timer in self._lost.values():
            timer.cancel()

    def _publish(self) -> None:
        before = self._by_lease.keys()
        members = tuple(self._records[key] for key in sorted(self._records))
        if members == self._members:
            return
        self._members = members
        # A process may have several keys: `get` returns its first record.
        self._by_lease = by_lease = {member.lease_id: member for member in reversed(members)}
        after = by_lease.keys()
        joined, left = frozenset(after - before), frozenset(before - after)
        if joined or left:
            self._listeners.notify(joined, left)
