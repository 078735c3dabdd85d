"""The keys of a process in a store whose answers come when the test says so."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from dynamo_lite.runtime.process.held_keys import HeldKeys
from dynamo_lite.runtime.store import Lease
from dynamo_lite.runtime.tasks import OwnedTasks
from tests.unit.process_run import RefusingStore

KEY = "n/one"


class Rig:
    def __init__(self, store: RefusingStore, lease: Lease, tasks: OwnedTasks):
        def spawn(coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
            return tasks.start(coro, name=name)

        self.store, self.keys = store, HeldKeys(store, lease, spawn)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with RefusingStore() as store, store.lease(30.0) as lease, OwnedTasks() as tasks:
        yield Rig(store, lease, tasks)


async def losing(rig: Rig) -> None:
    """The store loses the key, and has been asked to put it back."""
    rig.store.slow = await rig.store.get(KEY)
    await rig.store.delete(KEY)
    async with asyncio.timeout(5):
        await rig.store.asked.wait()


async def test_an_old_value_that_is_put_back_does_not_come_after_a_newer_one(rig: Rig) -> None:
    await rig.keys.hold(KEY, b"old")
    await losing(rig)
    async with OwnedTasks() as tasks, asyncio.timeout(5):
        newer = tasks.start(rig.keys.hold(KEY, b"new"), name="hold")
        await asyncio.sleep(0)
        rig.store.go.set()
        await newer
    assert await rig.store.get(KEY) == b"new"


async def test_a_key_that_is_released_while_it_is_put_back_is_deleted(rig: Rig) -> None:
    await rig.keys.hold(KEY, b"old")
    await losing(rig)
    async with OwnedTasks() as tasks, asyncio.timeout(5):
        released = tasks.start(rig.keys.release(KEY), name="release")
        await asyncio.sleep(0)
        rig.store.go.set()
        assert await released
    assert await rig.store.get(KEY) is None
