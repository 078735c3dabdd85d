"""The wait for what a watch shows first: all that is there when it begins."""

import asyncio
from collections.abc import AsyncIterator

from dynamo_lite.protocol.errors import DeadlineExceeded, StoreUnavailable
from dynamo_lite.runtime.store import WatchEvent

_WITHIN_S = 10.0


async def first_event(events: AsyncIterator[WatchEvent], prefix: str) -> WatchEvent:
    """Of a watch on `prefix`. Raises StoreUnavailable when it does not come in time."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await anext(events)
    except TimeoutError as exc:
        raise StoreUnavailable(f"timeout: no listing of {prefix} within {_WITHIN_S:g} s") from exc


async def until_listed(listed: asyncio.Event, what: str) -> None:
    """listed: set by the task that follows the watch. what: for the error. Raises
    DeadlineExceeded."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            await listed.wait()
    except TimeoutError as exc:
        raise DeadlineExceeded(what, _WITHIN_S) from exc
