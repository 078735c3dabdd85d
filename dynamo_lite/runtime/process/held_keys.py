"""The keys that a process holds under its lease: put, put back after a loss, deleted."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.runtime.retry import START_WAIT_S, retry_while_unavailable
from dynamo_lite.runtime.store import Delete, Lease, Snapshot, Store, WatchEvent

logger = logging.getLogger(__name__)

_RETRY_S = 0.2

#: Runs a task until the process ends.
Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


@dataclass
class _Key:
    #: None: the store may have it, and is not to.
    value: bytes | None = None
    #: Held while the store is asked to change it, so that no older value comes last.
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldKeys:
    """lease: all keys are put under it. spawn: runs the tasks."""

    def __init__(self, store: Store, lease: Lease, spawn: Spawn):
        self._store, self._lease, self._spawn = store, lease, spawn
        self._keys: dict[str, _Key] = {}
        self._guard: asyncio.Task[None] | None = None
        self._deleter: asyncio.Task[None] | None = None

    def held(self) -> list[str]:
        """Oldest first."""
        return [key for key, one in self._keys.items() if one.value is not None]

    async def hold(self, key: str, value: bytes, *, within_s: float = START_WAIT_S) -> None:
        """Puts `key` under the lease, and again whenever the store loses it while the lease is
        alive. Raises LeaseLost, or StoreUnavailable after `within_s`."""

        async def put() -> None:
            one = self._keys.setdefault(key, _Key())
            async with one.changing:
                await self._store.put(key, value, lease=self._lease)
                one.value = value
                self._keys[key] = one  # if it was deleted just before

        await retry_while_unavailable(put, within_s=within_s)
        if self._guard is None or self._guard.done():
            self._guard = self._spawn(self._watch_own(key), f"guard {key}")

    async def release(self, *keys: str) -> bool:
        """Deletes keys. Returns whether they are gone: if the store is unavailable, they are
        deleted when it is back, or expire with the lease."""
        for key in keys:
            self._keys.setdefault(key, _Key()).value = None
        if self._lease.loss is not None:
            return True
        left = [key for key in keys if not await self._delete(key)]
        if left:
            logger.warning("not deleted, retrying until the lease ends: %s", ", ".join(left))
            if self._deleter is None or self._deleter.done():
                self._deleter = self._spawn(self._delete_again(), "delete keys")
        return not left

    async def _delete(self, key: str) -> bool:
        """Returns False if a retry is needed."""
        one = self._keys.get(key)
        if one is None:
            return True
        async with one.changing:
            if one.value is not None:  # it is held again
                return True
            try:
                await self._store.delete(key)
            except StoreUnavailable as exc:
                logger.debug("%s was not deleted: %s", key, exc)
                return False
            self._keys.pop(key, None)
        return True

    async def _delete_again(self) -> None:
        while self._lease.loss is None:
            left = [key for key, one in self._keys.items() if one.value is None]
            if not left:
                return
            await asyncio.sleep(_RETRY_S)
            for key in left:
                await self._delete(key)

    async def _watch_own(self, key: str) -> None:
        """Watches one held key: its deletion is the first sign of a revoked lease.

        When that key is released, another held key is watched.
        """
        watched: str | None = key
        while watched is not None:
            if not await self._watch_one(watched):
                return
            watched = next(iter(self.held()), None)

    async def _watch_one(self, key: str) -> bool:
        """Returns True when the key was released, False when the lease is gone."""
        async with self._store.watch(key) as events:
            async for event in events:
                if (one := self._keys.get(key)) is None or one.value is None:
                    return True
                if _shows_absent(event, key) and not await self._restore():
                    return False
        return False

    async def _restore(self) -> bool:
        """Puts lost keys back while the lease is alive. Returns False when the lease is lost."""
        while await self._lease.verify() is None:
            try:
                await self._put_back()
                logger.warning("the store had lost keys of a live lease; they were put back")
                return True
            except LeaseLost as exc:
                # A revocation deletes the keys before the lease, and the first check was in
                # between. Without this check only the next refresh would detect it.
                logger.debug("%s", exc)
                if await self._lease.verify() is not None:
                    break
            except StoreUnavailable as exc:
                logger.debug("keys were not put back yet, retrying: %s", exc)
            await asyncio.sleep(_RETRY_S)
        return False

    async def _put_back(self) -> None:
        for key, one in list(self._keys.items()):
            async with one.changing:
                if one.value is not None:
                    await self._store.put(key, one.value, lease=self._lease)


def _shows_absent(event: WatchEvent, key: str) -> bool:
    match event:
        case Snapshot(entries):
            return key not in entries
        case Delete(deleted):
            return deleted == key
        case _:
            return False
