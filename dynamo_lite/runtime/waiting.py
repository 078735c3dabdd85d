"""Waits for the first or for all of several events, with a limit."""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from dynamo_lite.runtime.tasks import end_tasks


async def all_of(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Waits until all are set, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()


async def first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Waits until one coroutine has ended, `timeout_s` at most; cancels the others.

    Raises what one has raised, of several the first in the order of the arguments.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)
        failures = [exc for task in tasks if not task.cancelled() and (exc := task.exception())]
    for exc in failures:
        raise exc
