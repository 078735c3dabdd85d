"""Live options of a graph with a secret, on etcd: forged, copied, old and unsealed records."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.live_options import LiveOptionsRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from tests.builders import graph_secret
from tests.contract.test_live_options import COMPONENT, LENGTH, SIZE, Follower

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

OLD, NEW = b"o" * 32, b"n" * 32
#: A version that no clock gives.
NEVER = 1 << 60


@pytest.fixture
async def store(etcd_url: str) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(etcd_url) as store:
        yield store


@pytest.fixture
def seals(tmp_path: Path) -> RecordSeals:
    return RecordSeals(graph_secret(tmp_path / "secret", OLD))


@pytest.fixture
def key(namespace: str) -> str:
    return names.live_options_key(namespace, COMPONENT)


def record(length: int, version: int) -> bytes:
    return encode_json(LiveOptionsRecord(values={LENGTH: length}, version=version))


async def test_what_is_not_authentic_changes_nothing_and_is_counted(
    store: EtcdStore,
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


async def test_a_process_that_starts_on_a_forged_record_has_its_file(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, record(5, 9))
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        assert follower.values == {}
        assert follower.drops == {"unauthentic": 1} and not follower.told


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_old_record_is_not_taken_again(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals, deleted: bool
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
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
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
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, seals.sealed(key, record(5, NEVER)))
    follower = Follower(store, namespace, seals)
    async with follower.options.following():
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 6}, seals)
        await follower.until(lambda: follower.values == {LENGTH: 6})


async def test_the_secret_is_replaced_while_processes_follow(
    store: EtcdStore, namespace: str, key: str, tmp_path: Path
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
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, seals.sealed(key, record(5, 4)))
    follower = Follower(store, namespace, UNSEALED)
    async with follower.options.following():
        assert follower.values == {LENGTH: 5}
        await store.put(key, record(6, 1))
        await follower.until(lambda: follower.values == {LENGTH: 6})
    assert not follower.drops
