"""Live options on every store: who writes loses nothing, who follows takes only what is right."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import UNSET

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.live_options import LIVE_OPTIONS, LiveOptionsRecord, Values
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from dynamo_lite.runtime.store import Store
from tests.builders import graph_secret

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

COMPONENT = "VllmWorker"
LENGTH, SIZE = "max-local-prefill-length", "max-prefill-queue-size"


class Follower:
    def __init__(self, store: Store, namespace: str, seals: RecordSeals = UNSEALED):
        self.drops: Counter[str] = Counter()
        self.told: list[Values] = []
        self.news = asyncio.Event()
        self.options = LiveOptions(
            store, namespace, COMPONENT, on_change=self.take, on_drop=self.drop, seals=seals
        )

    @property
    def values(self) -> Values:
        return self.options.values

    def take(self, values: Values) -> None:
        self.told.append(values)
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
    async with follower.options.following():
        assert follower.values == {LENGTH: 100}
        changes = await live_options.write(store, namespace, COMPONENT, {LENGTH: 200, SIZE: 3})
        assert changes == [(f"{COMPONENT}.{LENGTH}", 100, 200), (f"{COMPONENT}.{SIZE}", UNSET, 3)]
        await follower.until(lambda: len(follower.told) == 2)
        await live_options.write(store, namespace, COMPONENT, {LENGTH: UNSET})
        await follower.until(lambda: len(follower.told) == 3)
        assert await live_options.write(store, namespace, COMPONENT, {SIZE: 3}) == []
        await store.delete(names.live_options_key(namespace, COMPONENT))
        await follower.until(lambda: len(follower.told) == 4)
    assert follower.told == [{LENGTH: 100}, {LENGTH: 200, SIZE: 3}, {SIZE: 3}, {}]


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
    follower = Follower(store, namespace)
    async with follower.options.following():
        for count, data in enumerate(BAD, 1):
            await store.put(key, data)
            await follower.until(lambda count=count: follower.drops["config"] == count)
            assert follower.values == {LENGTH: 100, SIZE: 3}
            with pytest.raises(StartupError, match=f"{key}: .*config unset {COMPONENT}"):
                await live_options.read(store, namespace, COMPONENT)
            with pytest.raises(StartupError):
                await live_options.write(store, namespace, COMPONENT, {LENGTH: 5})
            assert await store.get(key) == data
        edits = live_options.parse_unsets([COMPONENT])
        await live_options.write(store, namespace, COMPONENT, edits[COMPONENT])
        await follower.until(lambda: len(follower.told) == 2)
    assert follower.values == {}


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_follower_that_starts_on_a_bad_record_has_its_file(
    store: Store, namespace: str, tmp_path: Path, sealed: bool
):
    seals = RecordSeals(graph_secret(tmp_path / "secret")) if sealed else UNSEALED
    data = record(5, 9) if sealed else b"nonsense"
    await store.put(names.live_options_key(namespace, COMPONENT), data)
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        assert follower.values == {}
        where = "unauthentic" if sealed else "config"
        assert follower.drops == {where: 1} and not follower.told


async def test_a_component_whose_name_begins_alike_is_another(store: Store, namespace: str):
    other = encode_json(LiveOptionsRecord(values={LENGTH: 1}, version=7))
    follower = Follower(store, namespace)
    async with follower.options.following():
        await store.put(names.live_options_key(namespace, f"{COMPONENT}2"), other)
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 2})
        await follower.until(lambda: bool(follower.told))
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


# Of a graph with a secret: forged, copied, old and unsealed records.

OLD, NEW = b"o" * 32, b"n" * 32
#: A version that no clock gives.
NEVER = 1 << 60


@pytest.fixture
def seals(tmp_path: Path) -> RecordSeals:
    return RecordSeals(graph_secret(tmp_path / "secret", OLD))


@pytest.fixture
def key(namespace: str) -> str:
    return names.live_options_key(namespace, COMPONENT)


def record(length: int, version: int) -> bytes:
    return encode_json(LiveOptionsRecord(values={LENGTH: length}, version=version))


async def test_what_is_not_authentic_changes_nothing_and_is_counted(
    store: Store,
    namespace: str,
    key: str,
    seals: RecordSeals,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    other = names.live_options_key(namespace, "Frontend")
    another = RecordSeals(graph_secret(tmp_path / "another"))
    good = seals.sealed(key, record(5, NEVER))
    bad = {
        "unsealed": record(5, NEVER),
        "forged": another.sealed(key, record(5, NEVER)),
        "copied": seals.sealed(other, record(5, NEVER)),
        "changed": good.replace(b":5}", b":6}"),
        "no record": b"nonsense",
    }
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100}, seals)
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        for count, data in enumerate(bad.values(), 1):
            await store.put(key, data)
            await follower.until(lambda count=count: follower.drops["unauthentic"] == count)
            assert follower.values == {LENGTH: 100}
            with pytest.raises(StartupError, match=f"{key}: not authentic"):
                await live_options.read(store, namespace, COMPONENT, seals)
            for edit in ({LENGTH: 5}, {}):
                with pytest.raises(StartupError, match="not authentic"):
                    await live_options.write(store, namespace, COMPONENT, edit, seals)
            assert await store.get(key) == data
        edits = live_options.parse_unsets([COMPONENT])[COMPONENT]
        await live_options.write(store, namespace, COMPONENT, edits, seals)
        await follower.until(lambda: len(follower.told) == 2)
    assert follower.told == [{LENGTH: 100}, {}]
    assert follower.drops == {"unauthentic": len(bad)}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([text for text in warnings if "not authentic" in text]) == 1
    assert OLD.hex() not in caplog.text


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_old_record_is_not_taken_again(
    store: Store, namespace: str, key: str, seals: RecordSeals, deleted: bool
):
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100}, seals)
    old = await store.get(key)
    assert old is not None
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 200}, seals)
        await follower.until(lambda: len(follower.told) == 2)
        if deleted:
            await store.delete(key)
            await follower.until(lambda: len(follower.told) == 3)
        await store.put(key, old)
        await follower.until(lambda: follower.drops["unauthentic"] == 1)
        assert follower.values == ({} if deleted else {LENGTH: 200})
        await live_options.write(store, namespace, COMPONENT, {SIZE: 3}, seals)
        await follower.until(lambda: SIZE in follower.values)


async def test_what_is_set_after_the_record_was_deleted_is_newer_than_it(
    store: Store, namespace: str, key: str, seals: RecordSeals
):
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        for length in (1, 2, 3, 4, 5):
            await live_options.write(store, namespace, COMPONENT, {LENGTH: length}, seals)
            await follower.until(lambda length=length: follower.values == {LENGTH: length})
            await store.delete(key)
            await follower.until(lambda: follower.values == {})
    assert not follower.drops


async def test_a_clock_that_is_set_back_does_not_keep_a_change_from_its_readers(
    store: Store, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, seals.sealed(key, record(5, NEVER)))
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 6}, seals)
        await follower.until(lambda: follower.values == {LENGTH: 6})


async def test_the_secret_is_replaced_while_processes_follow(
    store: Store, namespace: str, key: str, tmp_path: Path
):
    """A value that is set again to what it is seals the whole record with the new key."""
    path = tmp_path / "secret"

    def rewrite(*keys: bytes) -> RecordSeals:
        """As a process that starts now has it."""
        return RecordSeals(graph_secret(path, *keys))

    first = rewrite(OLD)
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100, SIZE: 3}, first)
    old = await store.get(key)
    assert old is not None
    both = rewrite(NEW, OLD)
    follower = Follower(store, namespace, both)
    async with follower.options.following():
        assert follower.values == {LENGTH: 100, SIZE: 3}
        assert await live_options.write(store, namespace, COMPONENT, {SIZE: 3}, both) == []
        await store.put(key, old)
        await follower.until(lambda: follower.drops["unauthentic"] == 1)
        assert await live_options.write(store, namespace, COMPONENT, {SIZE: 3}, both) == []
    assert len(follower.told) == 1
    late = Follower(store, namespace, rewrite(NEW))
    async with late.options.following():
        assert late.values == {LENGTH: 100, SIZE: 3}
        gone = RecordSeals(graph_secret(tmp_path / "gone", OLD))
        await store.put(key, gone.sealed(key, record(5, NEVER)))
        await late.until(lambda: late.drops["unauthentic"] == 1)
        assert late.values == {LENGTH: 100, SIZE: 3}


async def test_without_a_secret_sealed_and_unsealed_records_are_followed(
    store: Store, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, seals.sealed(key, record(5, 4)))
    follower = Follower(store, namespace, UNSEALED)
    async with follower.options.following():
        assert follower.values == {LENGTH: 5}
        await store.put(key, record(6, 1))
        await follower.until(lambda: follower.values == {LENGTH: 6})
    assert not follower.drops
