"""Live options on every store: who writes loses nothing, who follows takes only what is right."""

import asyncio
from collections import Counter

import pytest
from msgspec import UNSET

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.live_options import LIVE_OPTIONS, LiveOptionsRecord, Values
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.store import Store
from tests.builders import eventually

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

COMPONENT = "VllmWorker"
LENGTH, SIZE = "max-local-prefill-length", "max-prefill-queue-size"


class Follower:
    def __init__(self, store: Store, namespace: str):
        self.drops: Counter[str] = Counter()
        self.told: list[Values] = []
        self.options = LiveOptions(
            store, namespace, COMPONENT, on_change=self.take, on_drop=self.drop
        )

    @property
    def values(self) -> Values:
        return self.options.values

    def take(self, values: Values) -> None:
        self.told.append(values)

    def drop(self, where: str) -> None:
        self.drops[where] += 1


async def test_a_follower_has_what_was_set_before_and_hears_what_is_set(
    store: Store, namespace: str
):
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100})
    follower = Follower(store, namespace)
    async with follower.options.following():
        assert follower.values == {LENGTH: 100}
        changes = await live_options.write(store, namespace, COMPONENT, {LENGTH: 200, SIZE: 3})
        assert changes == [(f"{COMPONENT}.{LENGTH}", 100, 200), (f"{COMPONENT}.{SIZE}", UNSET, 3)]
        await eventually(lambda: len(follower.told) == 2)
        await live_options.write(store, namespace, COMPONENT, {LENGTH: UNSET})
        await eventually(lambda: len(follower.told) == 3)
        assert await live_options.write(store, namespace, COMPONENT, {SIZE: 3}) == []
        await store.delete(names.live_options_key(namespace, COMPONENT))
        await eventually(lambda: len(follower.told) == 4)
    assert follower.told == [{LENGTH: 100}, {LENGTH: 200, SIZE: 3}, {SIZE: 3}, {}]


BAD = [
    b"",
    b"{}",
    b"\xff",
    b"[" * 10_000,
    b'{"values":{"max-local-prefill-length":-1}}',
    b'{"values":{"max-local-prefill-length":1.5}}',
    b'{"values":{"remote-prefill-timeout-s":null}}',
    b'{"values":{"what-is-this":1}}',
    b'{"record":{"values":{}}}',
]


async def test_what_is_no_record_is_refused_as_a_whole_and_counted(store: Store, namespace: str):
    key = names.live_options_key(namespace, COMPONENT)
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100, SIZE: 3})
    follower = Follower(store, namespace)
    async with follower.options.following():
        for count, data in enumerate(BAD, 1):
            await store.put(key, data)
            await eventually(lambda count=count: follower.drops["config"] == count)
            assert follower.values == {LENGTH: 100, SIZE: 3}
            with pytest.raises(StartupError, match=f"{key}: .*config unset {COMPONENT}"):
                await live_options.read(store, namespace, COMPONENT)
            with pytest.raises(StartupError):
                await live_options.write(store, namespace, COMPONENT, {LENGTH: 5})
            assert await store.get(key) == data
        edits = live_options.parse_unsets([COMPONENT])
        await live_options.write(store, namespace, COMPONENT, edits[COMPONENT])
        await eventually(lambda: len(follower.told) == 2)
    assert follower.values == {}


async def test_a_follower_that_starts_on_a_bad_record_has_its_file(store: Store, namespace: str):
    await store.put(names.live_options_key(namespace, COMPONENT), b"nonsense")
    follower = Follower(store, namespace)
    async with follower.options.following():
        assert follower.values == {}
        assert follower.drops == {"config": 1} and not follower.told


async def test_a_component_whose_name_begins_alike_is_another(store: Store, namespace: str):
    other = encode_json(LiveOptionsRecord(values={LENGTH: 1}))
    follower = Follower(store, namespace)
    async with follower.options.following():
        await store.put(names.live_options_key(namespace, f"{COMPONENT}2"), other)
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 2})
        await eventually(lambda: bool(follower.told))
    assert follower.told == [{LENGTH: 2}]


async def test_writers_at_the_same_time_lose_nothing(store: Store, namespace: str):
    """Each changes an option of its own; more of them than tries would be too many."""
    values = dict.fromkeys(LIVE_OPTIONS[COMPONENT], 5)
    await asyncio.gather(
        *(
            live_options.write(store, namespace, COMPONENT, {name: value})
            for name, value in values.items()
        )
    )
    assert await live_options.read(store, namespace, COMPONENT) == values
