"""Retry while a server is unavailable, so that a short outage does not fail a process's start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dynamo_lite.protocol.errors import Unavailable

#: The same as the timeout of the first connection to a server.
START_WAIT_S = 10.0
_PAUSE_S = 0.1

T = TypeVar("T")


async def retry_while_unavailable(
    call: Callable[[], Awaitable[T]], *, within_s: float = START_WAIT_S
) -> T:
    """Retries `call`, which must be idempotent, while it raises Unavailable.

    Raises the last Unavailable after `within_s` seconds, and every other exception at once.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        try:
            return await call()
        except Unavailable:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_S)
