"""What a switchable worker's roles read of their engine's prefix cache."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_lite.vllm.engine.kept_core import FollowedKvEvents


class Events:
    """One change, then a failure."""

    def __init__(self) -> None:
        self.fail = asyncio.Event()

    async def changes(self) -> AsyncIterator[list[Any]]:
        yield ["a change"]
        await self.fail.wait()
        raise ValueError("a malformed event")


async def test_the_role_fails_that_reads_when_the_engine_can_no_longer_be_followed():
    events: Any = Events()
    followed = FollowedKvEvents(events)
    first = followed.changes()
    begun = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    follow = asyncio.create_task(followed.follow())
    assert await begun == ["a change"]
    events.fail.set()
    with pytest.raises(ValueError, match="a malformed event"):
        await anext(first)
    with pytest.raises(ValueError, match="a malformed event"):
        await anext(followed.changes())
    with pytest.raises(ValueError, match="a malformed event"):
        await follow
