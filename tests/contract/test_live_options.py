"""Live options on every store: who writes loses nothing, who follows takes only what is right."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec import UNSET

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.live_options import (
    LiveOptionsRecord,
    VllmWorkerLiveOptions,
    encode_live_options,
)
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from dynamo_lite.runtime.store import Store

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

COMPONENT = "VllmWorker"
LENGTH, SIZE = "max-local-prefill-length", "max-prefill-queue-size"


class Follower:
    def __init__(self, store: Store, namespace: str, seals: RecordSeals = UNSEALED):
        self.drops: Counter[str] = Counter()
        self.told: list[tuple[VllmWorkerLiveOptions, int]] = []
        self.news = asyncio.Event()
        self.live = LiveOptions(
            store,
            namespace,
            COMPONENT,
            VllmWorkerLiveOptions(),
            on_change=self.take,
            on_drop=self.drop,
            seals=seals,
        )

    def take(self, values: VllmWorkerLiveOptions, version: int) -> None:
        self.told.append((values, version))
        self.news.set()

    def drop(self, where: str) -> None:
        self.drops[where] += 1
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                await self.news.wait()


async def test_a_follower_has_what_was_set_before_and_hears_what_is_set(
    store: Store, namespace: str
):
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100})
    follower = Follower(store, namespace)
    async with follower.live as live:
        assert (live.values.max_local_prefill_length, live.version) == (100, 1)
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 200, SIZE: 3})
        await follower.until(lambda: live.version == 2)
        assert live.values == VllmWorkerLiveOptions(
            max_local_prefill_length=200, max_prefill_queue_size=3
        )
        await live_options.write(store, namespace, COMPONENT, {LENGTH: UNSET})
        await follower.until(lambda: live.version == 3)
        assert live.values == VllmWorkerLiveOptions(max_prefill_queue_size=3)
        await store.delete(names.live_options_key(namespace, COMPONENT))
        await follower.until(lambda: live.version == 0)
        assert live.values == VllmWorkerLiveOptions()
    assert [version for _, version in follower.told] == [1, 2, 3, 0]


BAD = [
    b"",
    b"{}",
    b"\xff",
    b"[" * 10_000,
    b'{"values":{"max-local-prefill-length":-1},"version":9}',
    b'{"values":{"max-local-prefill-length":1.5},"version":9}',
    b'{"values":{"remote-prefill-timeout-s":null},"version":9}',
    b'{"values":{"what-is-this":1},"version":9}',
    b'{"values":{"max-local-prefill-length":7},"version":0}',
    b'{"values":{"max-local-prefill-length":7}}',
]


async def test_what_is_no_record_is_refused_as_a_whole_and_counted(store: Store, namespace: str):
    key = names.live_options_key(namespace, COMPONENT)
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100, SIZE: 3})
    good = await store.get(key)
    assert good is not None
    follower = Follower(store, namespace)
    async with follower.live as live:
        for count, data in enumerate(BAD, 1):
            await store.put(key, data)
            await follower.until(lambda count=count: follower.drops["config"] == count)
            assert live.refused
            assert (live.values.max_local_prefill_length, live.version) == (100, 1)
            with pytest.raises(ProtocolError):
                await live_options.read(store, namespace, COMPONENT)
            with pytest.raises(ProtocolError):
                await live_options.write(store, namespace, COMPONENT, {LENGTH: 5})
            assert await store.get(key) == data
        edits = live_options.parse_unsets([COMPONENT])
        await live_options.write(store, namespace, COMPONENT, edits[COMPONENT])
        await follower.until(lambda: not live.refused)
        assert live.values == VllmWorkerLiveOptions()
    assert len(follower.told) == 2


async def test_a_follower_that_starts_on_a_bad_record_has_its_file(store: Store, namespace: str):
    await store.put(names.live_options_key(namespace, COMPONENT), b"nonsense")
    follower = Follower(store, namespace)
    async with follower.live as live:
        assert (live.values, live.version) == (VllmWorkerLiveOptions(), 0)
        assert live.refused and follower.drops == {"config": 1} and not follower.told


async def test_a_component_whose_name_begins_alike_is_another(store: Store, namespace: str):
    other = LiveOptionsRecord(values=VllmWorkerLiveOptions(max_local_prefill_length=1), version=7)
    follower = Follower(store, namespace)
    async with follower.live as live:
        await store.put(
            names.live_options_key(namespace, f"{COMPONENT}2"), encode_live_options(other)
        )
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 2})
        await follower.until(lambda: live.version == 1)
    assert [version for _, version in follower.told] == [1]


async def test_writers_at_the_same_time_lose_nothing(store: Store, namespace: str):
    """Each changes an option of its own; more of them than tries would be too many."""
    options = list(live_options.options_of(COMPONENT))
    other = {"steal-back": False}
    values = {name: other.get(name, 5) for name in options}
    await asyncio.gather(
        *(
            live_options.write(store, namespace, COMPONENT, {name: value})
            for name, value in values.items()
        )
    )
    record = await live_options.read(store, namespace, COMPONENT)
    assert record is not None and record.version == len(options)
    assert [
        getattr(record.values, field) for field in live_options.options_of(COMPONENT).values()
    ] == list(values.values())
    user, at, host = record.by.partition("@")
    assert user and at and host and record.at > 0


async def test_changes_are_told_as_they_happen(store: Store, namespace: str):
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100})
    changes = live_options.changes(store, namespace)
    following = asyncio.ensure_future(anext(changes))
    # The watch lists first; what is written before that is no change.
    while (await asyncio.wait({following}, timeout=0.05))[1] == {following}:
        record = await live_options.read(store, namespace, COMPONENT)
        assert record is not None
        await live_options.write(store, namespace, COMPONENT, {SIZE: record.version})
    change = following.result()
    assert isinstance(change, live_options.RecordChange)
    [(key, _, after)] = live_options.differences(change)
    assert change.new is not None
    assert (key, after) == (f"{COMPONENT}.{SIZE}", change.new.values.max_prefill_queue_size)
    await store.put(names.live_options_key(namespace, COMPONENT), b"{}")
    while isinstance(change := await anext(changes), live_options.RecordChange):
        pass
    assert "refused" in change
    await changes.aclose()
