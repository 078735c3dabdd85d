"""The keys that a process holds under its lease: put, put back after a loss, deleted."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.runtime.retry import START_WAIT_S, retry_while_unavailable
from dynamo_lite.runtime.store import Lease, Store, changes

logger = logging.getLogger(__name__)

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
        #: Keys with a task that watches them.
        self._guarded: set[str] = set()

    async def hold(self, key: str, value: bytes, *, within_s: float = START_WAIT_S) -> None:
        """Puts `key` under the lease, and again whenever the store loses it while the lease is
        alive. Raises LeaseLost, or StoreUnavailable after `within_s`."""

        async def put() -> None:
            async with self._changing:
                await self._store.put(key, value, lease=self._lease)
                self._keys[key] = value

        await retry_while_unavailable(put, within_s=within_s)
        if key not in self._guarded:
            self._guarded.add(key)
            self._spawn(self._guard(key), f"guard {key}")

    async def release(self, *keys: str) -> bool:
        """Deletes keys. Returns whether they are gone: if the store is unavailable, they are
        deleted when it is back, or expire with the lease."""
        self._keys.update(dict.fromkeys(keys))
        try:
            await self._delete_released()
        except StoreUnavailable as exc:
            logger.warning("not deleted, retrying until it is: %s: %s", ", ".join(keys), exc)
            again = retry_while_unavailable(self._delete_released, within_s=math.inf)
            self._spawn(again, "delete keys")
            return False
        return True

    async def _delete_released(self) -> None:
        """Raises StoreUnavailable."""
        if self._lease.loss is not None:
            return
        async with self._changing:
            for key in [key for key, value in self._keys.items() if value is None]:
                await self._store.delete(key)
                del self._keys[key]

    async def _guard(self, key: str) -> None:
        """Watches a key until it is released: its deletion is the first sign of a revoked lease."""
        try:
            while self._keys.get(key) is not None:
                async with self._store.watch(key) as events:
                    async for event in events:
                        if self._keys.get(key) is None:
                            break
                        if changes(event, (key,)).get(key, b"") is None:
                            put = partial(self._put_back, key)
                            await retry_while_unavailable(put, within_s=math.inf)
        except LeaseLost as exc:
            # A revocation deletes the keys before the lease, and the check was in between.
            logger.debug("%s is gone: %s", key, exc)
            await self._lease.verify()
        finally:
            self._guarded.discard(key)

    async def _put_back(self, key: str) -> None:
        """Raises LeaseLost, StoreUnavailable."""
        await self._lease.verify()
        async with self._changing:
            if (value := self._keys.get(key)) is not None:
                await self._store.put(key, value, lease=self._lease)
                logger.warning("the store had lost %s of a live lease; it is back", key)
