"""What tests wait for while a store is away, and when it is back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.store import Lease, Store, WatchEvent

T = TypeVar("T")


async def take(events: AsyncIterator[WatchEvent], timeout_s: float = 10.0) -> WatchEvent:
    """The next event of a watch."""
    async with asyncio.timeout(timeout_s):
        return await anext(events)


async def when_back(call: Callable[[], Awaitable[T]], within_s: float = 10.0) -> T:
    """The result of the first call that the store answers. A call may have been applied before."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def put_when_back(
    store: Store, key: str, value: bytes, *, lease: Lease | None = None, within_s: float = 10.0
) -> None:
    await when_back(lambda: store.put(key, value, lease=lease), within_s)


async def refreshed_once_more(lease: Lease) -> None:
    """The store of now has refreshed the lease. The last refresh may be that of the one before."""
    async with asyncio.timeout(lease.ttl_s):
        left = lease.remaining_s()
        while (now_left := lease.remaining_s()) <= left:
            assert lease.loss is None
            left = now_left
            await asyncio.sleep(0.01)
