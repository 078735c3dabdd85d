"""Options of a component that are changed while it runs (`protocol/live_options.py`).

Owns which of them hold in this process: the last good record in the store. What is
no such record is refused as a whole, and what held before goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Generic, Self, TypeVar

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DeadlineExceeded, ProtocolError
from dynamo_lite.protocol.live_options import decode_tuning
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent
from dynamo_lite.runtime.tasks import running

logger = logging.getLogger(__name__)

_FIRST_LISTING_S = 10.0

T = TypeVar("T", bound=msgspec.Struct)


class LiveOptions(Generic[T]):
    """Async context manager; entering it waits for the first look at the store.

    nothing: what holds where no record is. on_change: takes the values and their version,
    from the event loop, whenever these change.

    values, version: of the last good record; version 0: there is none. refused: what is
    wrong with the one that lies there now; empty when nothing is.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        component: str,
        nothing: T,
        *,
        on_change: Callable[[T, int], None],
        on_drop: OnDrop = uncounted,
    ):
        self._store, self._key = store, names.tuning_key(namespace, component)
        self._nothing, self._on_change, self._on_drop = nothing, on_change, on_drop
        self.values, self.version, self.refused = nothing, 0, ""
        self._looked = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"LiveOptions({self._key!r}, version={self.version}, {self.values})"

    async def __aenter__(self) -> Self:
        """Raises DeadlineExceeded or StoreUnavailable."""
        async with contextlib.AsyncExitStack() as stack:
            events = await stack.enter_async_context(self._store.watch(self._key))
            follower = running(self._follow(events), name=f"options {self._key}")
            await stack.enter_async_context(follower)
            try:
                async with asyncio.timeout(_FIRST_LISTING_S):
                    await self._looked.wait()
            except TimeoutError as exc:
                raise DeadlineExceeded(f"options at {self._key}", _FIRST_LISTING_S) from exc
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _follow(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            match event:
                case Snapshot(entries):
                    self._take(entries.get(self._key))
                case Put(key, value) if key == self._key:
                    self._take(value)
                case Delete(key) if key == self._key:
                    self._take(None)
                case _:  # another component's, whose name begins like ours
                    pass
            self._looked.set()

    def _take(self, data: bytes | None) -> None:
        values, version = self._nothing, 0
        try:
            if data is not None:
                record = decode_tuning(data, type(self._nothing))
                values, version = record.values, record.version
        except ProtocolError as exc:
            self.refused = str(exc)
            self._on_drop("config")
            logger.warning("%s: refused, nothing changes: %s", self._key, exc)
            return
        self.refused = ""
        if (values, version) == (self.values, self.version):
            return
        self.values, self.version = values, version
        logger.info("%s: version %d holds: %s", self._key, version, msgspec.to_builtins(values))
        self._on_change(values, version)
