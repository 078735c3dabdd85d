"""Options of a component that can be changed while it runs (`protocol/live_options.py`).

Owns the values that are in effect in this process: those of the last valid record in the
store. A record that is invalid, not authentic, or older than one before it is refused as a whole,
and the values before stay in effect.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Generic, Self, TypeVar

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.live_options import decode_live_options
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.first_listing import until_listed
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from dynamo_lite.runtime.store import Delete, Put, Snapshot, Store, WatchEvent
from dynamo_lite.runtime.tasks import OnFailure, log_failure, running

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


class LiveOptions(Generic[T]):
    """Async context manager; entering it waits for the first listing of the store.

    nothing: the values without a record.
    on_change: takes new values and their version, in the event loop.
    seals: those of the graph's secret.
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
        seals: RecordSeals = UNSEALED,
        on_failure: OnFailure = log_failure,
    ):
        self._on_failure = on_failure
        self._store, self._key = store, names.live_options_key(namespace, component)
        self._nothing, self._on_change, self._on_drop = nothing, on_change, on_drop
        self._seals, self._log_limit = seals, LogLimit()
        #: The values of the last valid record, and its version; version 0 without one.
        self.values, self.version = nothing, 0
        #: The highest version so far, also of a record that is gone.
        self.newest = 0
        #: Why the present record is refused; empty when it is not.
        self.refused = ""
        self._listed = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"LiveOptions({self._key!r}, version={self.version}, {self.values})"

    async def __aenter__(self) -> Self:
        """Raises DeadlineExceeded or StoreUnavailable."""
        async with contextlib.AsyncExitStack() as stack:
            events = await stack.enter_async_context(self._store.watch(self._key))
            name, on_failure = f"options {self._key}", self._on_failure
            follower = running(self._follow(events), name=name, on_failure=on_failure)
            await stack.enter_async_context(follower)
            await until_listed(self._listed, f"options at {self._key}")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _follow(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            match event:
                case Snapshot(entries):
                    self._apply(entries.get(self._key))
                case Put(key, value) if key == self._key:
                    self._apply(value)
                case Delete(key) if key == self._key:
                    self._apply(None)
                case _:  # a component whose name begins with this one's
                    pass
            self._listed.set()

    def _apply(self, data: bytes | None) -> None:
        values, version = self._nothing, 0
        if data is not None:
            try:
                content = self._seals.opened(self._key, data)
            except ProtocolError as exc:
                self._refuse_unauthentic(str(exc))
                return
            try:
                record = decode_live_options(content, type(self._nothing))
            except ProtocolError as exc:
                self.refused = str(exc)
                self._on_drop("config")
                logger.warning("%s: invalid options refused, nothing changes: %s", self._key, exc)
                return
            if self._seals.checked and record.version < self.newest:
                self._refuse_unauthentic(
                    f"not authentic: version {record.version} came after version {self.newest}"
                )
                return
            values, version = record.values, record.version
        self.refused, self.newest = "", max(self.newest, version)
        if (values, version) == (self.values, self.version):
            return
        self.values, self.version = values, version
        logger.info(
            "%s: version %d is in effect: %s", self._key, version, msgspec.to_builtins(values)
        )
        self._on_change(values, version)

    def _refuse_unauthentic(self, why: str) -> None:
        self.refused = why
        self._on_drop("unauthentic")
        if (more := self._log_limit.allow()) is not None:
            logger.warning(
                "%s: options refused (and %d before), nothing changes: %s", self._key, more, why
            )
