"""Runs one coroutine in virtual time: what waits for minutes takes no time."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.loop.loop import VirtualLoop


def run(work: Coroutine[Any, Any, None], *, seed: int = 0) -> None:
    """Fails when the work does, when a callback raises, or when a task is left."""

    async def to_the_end() -> None:
        await work
        for _ in range(20):  # tasks that were just cancelled need a few turns to end
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left running: {left}"

    with VirtualLoop(seed) as loop:
        loop.run_until_complete(to_the_end())
        assert loop.failures == []


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The decorated coroutine function as a test that runs in virtual time."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return wrapper
