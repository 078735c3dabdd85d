"""Waiting for a server that is out of reach: what a start does, so that a short outage
costs no process its start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dynamo_lite.protocol.errors import Unavailable

#: As long as the first connection to a server is waited for.
START_WAIT_S = 10.0
_PAUSE_S = 0.1

T = TypeVar("T")


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]], *, within_s: float = START_WAIT_S
) -> T:
    """Calls again while that raises Unavailable; what it raises after `within_s` seconds,
    and everything else, passes through. The call must be one that may be repeated."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        try:
            return await call()
        except Unavailable:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_S)
