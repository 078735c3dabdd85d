"""The keys that a process holds under its lease: put, put back after a loss, deleted."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.runtime.retry import START_WAIT_S, retry_while_unavailable
from dynamo_lite.runtime.store import Delete, Lease, Snapshot, Store, WatchEvent

logger = logging.getLogger(__name__)

_RETRY_S = 0.2

#: Runs a task until the process ends.
Spawn = Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]


class HeldKeys:
    """lease: all keys are put under it. spawn: runs the tasks."""

    def __init__(self, store: Store, lease: Lease, spawn: Spawn):
        self._store, self._lease, self._spawn = store, lease, spawn
        #: None: the store may have the key, and is not to.
        self._keys: dict[str, bytes | None] = {}
        #: Held while the store is asked to change a key, so that no older value comes last.
        self._changing = asyncio.Lock()
        self._guard: asyncio.Task[None] | None = None
        self._deleter: asyncio.Task[None] | None = None

    def held(self) -> list[str]:
        """Oldest first."""
        return [key for key, value in self._keys.items() if value is not None]

    async def hold(self, key: str, value: bytes, *, within_s: float = START_WAIT_S) -> None:
        """Puts `key` under the lease, and again whenever the store loses it while the lease is
        alive. Raises LeaseLost, or StoreUnavailable after `within_s`."""

        async def put() -> None:
            async with self._changing:
                await self._store.put(key, value, lease=self._lease)
                self._keys[key] = value

        await retry_while_unavailable(put, within_s=within_s)
        if self._guard is None or self._guard.done():
            self._guard = self._spawn(self._guard_keys(), f"guard {key}")

    async def release(self, *keys: str) -> bool:
        """Deletes keys. Returns whether they are gone: if the store is unavailable, they are
        deleted when it is back, or expire with the lease."""
        self._keys.update(dict.fromkeys(keys))
        if self._lease.loss is not None or await self._delete_released():
            return True
        logger.warning("not deleted, retrying until the lease ends: %s", ", ".join(keys))
        if self._deleter is None or self._deleter.done():
            self._deleter = self._spawn(self._delete_again(), "delete keys")
        return False

    async def _delete_released(self) -> bool:
        """Returns False if a retry is needed."""
        async with self._changing:
            for key in [key for key, value in self._keys.items() if value is None]:
                try:
                    await self._store.delete(key)
                except StoreUnavailable as exc:
                    logger.debug("%s was not deleted: %s", key, exc)
                    return False
                del self._keys[key]
        return True

    async def _delete_again(self) -> None:
        while self._lease.loss is None:
            await asyncio.sleep(_RETRY_S)
            if await self._delete_released():
                return

    async def _guard_keys(self) -> None:
        """Watches one held key, and another one when that is released: its deletion is the first
        sign of a revoked lease."""
        while held := self.held():
            async with self._store.watch(held[0]) as events:
                async for event in events:
                    if self._keys.get(held[0]) is None:
                        break
                    if _shows_absent(event, held[0]) and not await self._restore():
                        return

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
        async with self._changing:
            for key in self.held():
                if (value := self._keys[key]) is not None:
                    await self._store.put(key, value, lease=self._lease)


def _shows_absent(event: WatchEvent, key: str) -> bool:
    match event:
        case Snapshot(entries):
            return key not in entries
        case Delete(deleted):
            return deleted == key
        case _:
            return False
