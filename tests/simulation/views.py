"""The contents that the watches of simulated processes have given, compared with the store."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Delete, Put, Snapshot, WatchEvent
from tests.simulation.loop.process import SimProcess
from tests.simulation.servers.etcd_data import EtcdData


class View(AsyncIterator[WatchEvent]):
    """The events of one watch."""

    def __init__(self, process: SimProcess, prefix: str, events: AsyncIterator[WatchEvent]):
        self.process, self.prefix = process, prefix
        #: The content after the events received so far; None before the first one.
        self.entries: dict[str, bytes] | None = None
        self._events = events

    def __aiter__(self) -> "View":
        return self

    async def __anext__(self) -> WatchEvent:
        event = await anext(self._events)
        match event:
            case Snapshot(entries):
                self.entries = dict(entries)
            case Put(key, value):
                assert self.entries is not None
                self.entries[key] = value
            case Delete(key):
                assert self.entries is not None
                self.entries.pop(key, None)
        return event


class Views:
    """The views of all open watches."""

    def __init__(self) -> None:
        self._open: dict[View, None] = {}

    @contextlib.asynccontextmanager
    async def seen(
        self, opened: AbstractAsyncContextManager[EtcdStore], process: SimProcess
    ) -> AsyncIterator[EtcdStore]:
        """Opens the store of `process`, and records its watches here."""
        async with opened as store:
            watch = store.watch

            @contextlib.asynccontextmanager
            async def noted(prefix: str) -> AsyncIterator[Any]:
                async with watch(prefix) as events:
                    view = View(process, prefix, events)
                    self._open[view] = None
                    try:
                        yield view
                    finally:
                        del self._open[view]

            store.watch = noted
            yield store

    def differing(self, data: EtcdData) -> str | None:
        """The first watch with another content than the store; None if all agree."""
        for view in self._open:
            if view.process.dead:
                continue
            held = data.matching(view.prefix)
            if view.entries != held:
                keys = sorted({*held, *(view.entries or ())})
                wrong = [key for key in keys if held.get(key) != (view.entries or {}).get(key)]
                return f"{view.process}: the watch on {view.prefix} is wrong about {wrong}"
        return None
