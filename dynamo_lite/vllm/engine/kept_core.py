"""The engine of a switchable worker, which outlives the worker's roles."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from dynamo_lite.protocol.kv import KvChange
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.vllm.engine.kv_events import VllmKvEvents
from dynamo_lite.vllm.engine.running_core import RunningCore


class FollowedKvEvents:
    """Follows the engine's prefix cache in every role, so that a decode worker knows what it holds
    from its first moment. Implements `KvEvents` for the role that publishes."""

    def __init__(self, events: VllmKvEvents):
        self._events = events
        self._reader: asyncio.Queue[list[KvChange] | Exception] | None = None
        self._failure: Exception | None = None

    @property
    def block_size_tokens(self) -> int:
        return self._events.block_size_tokens

    def held(self) -> Sequence[int]:
        return self._events.held()

    def cuts(self) -> Sequence[int]:
        return self._events.cuts()

    async def changes(self) -> AsyncIterator[list[KvChange]]:
        """Raises what has ended `follow`."""
        self._reader = reader = asyncio.Queue[list[KvChange] | Exception]()
        if self._failure is not None:
            reader.put_nowait(self._failure)
        try:
            while True:
                item = await reader.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._reader = None

    async def follow(self) -> None:
        try:
            async for changes in self._events.changes():
                if self._reader is not None:
                    self._reader.put_nowait(changes)
        except Exception as exc:
            self._failure = exc
            if self._reader is not None:
                self._reader.put_nowait(exc)
            raise


class KeptCore:
    """`close` ends the engine; until then each role takes it over from the one before."""

    def __init__(self) -> None:
        #: None if the engine has no prefix cache that can be followed, or before its start.
        self.events: FollowedKvEvents | None = None
        self._core: RunningCore | None = None
        self._tasks = OwnedTasks()
        self._on_drop: OnDrop = uncounted

    @property
    def change_s(self) -> float | None:
        """How long the engine's last change of its role took; None: it has had one."""
        return None if self._core is None else self._core.change_s

    def of_role(self, args: list[str], on_drop: OnDrop) -> RunningCore:
        """The engine for a new role. args: used for the start. on_drop: of the role."""
        self._on_drop = on_drop
        if self._core is None:
            self._core = RunningCore(args, lambda what: self._on_drop(what))
        return self._core

    def started(self) -> None:
        """The engine is up: follows its prefix cache."""
        core = self._core
        if core is not None and core.kv_events is not None and self.events is None:
            self.events = FollowedKvEvents(core.kv_events)
            self._tasks.start(self.events.follow(), name="kv-events")

    async def close(self) -> None:
        await self._tasks.end()
        if self._core is not None:
            await self._core.close()
