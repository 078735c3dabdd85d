"""Live options of a graph with a secret, on etcd: forged, copied, old and unsealed records."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.live_options import (
    LiveOptionsRecord,
    VllmWorkerLiveOptions,
    encode_live_options,
)
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from tests.builders import graph_secret
from tests.contract.test_live_options import COMPONENT, LENGTH, SIZE, Follower

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

OLD, NEW = b"o" * 32, b"n" * 32


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
    values = VllmWorkerLiveOptions(max_local_prefill_length=length)
    return encode_live_options(LiveOptionsRecord(values=values, version=version))


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
    good = seals.sealed(key, record(5, 9))
    bad = {
        "unsealed": record(5, 9),
        "forged": another.sealed(key, record(5, 9)),
        "copied": seals.sealed(other, record(5, 9)),
        "changed": good.replace(b":5}", b":6}"),
        "no record": b"nonsense",
    }
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100}, seals=seals)
    follower = Follower(store, namespace, seals)
    async with follower.live as live:
        for count, data in enumerate(bad.values(), 1):
            await store.put(key, data)
            await follower.until(lambda count=count: follower.drops["unauthentic"] == count)
            assert "not authentic" in live.refused
            assert (live.values.max_local_prefill_length, live.version) == (100, 1)
            with pytest.raises(ProtocolError, match=f"{key}: not authentic"):
                await live_options.read(store, namespace, COMPONENT, seals)
            for edit in ({LENGTH: 5}, {}):
                with pytest.raises(ProtocolError, match="not authentic"):
                    await live_options.write(store, namespace, COMPONENT, edit, seals=seals)
            assert await store.get(key) == data
        edits = live_options.parse_unsets([COMPONENT])[COMPONENT]
        change = await live_options.write(
            store, namespace, COMPONENT, edits, seals=seals, newest=live.newest
        )
        assert change.new is not None and change.new.version == 2
        await follower.until(lambda: not live.refused)
        assert (live.values, live.version) == (VllmWorkerLiveOptions(), 2)
    assert [version for _, version in follower.told] == [1, 2]
    assert follower.drops == {"unauthentic": len(bad)}
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([text for text in warnings if "not authentic" in text]) == 1
    assert OLD.hex() not in caplog.text


async def test_a_process_that_starts_on_a_forged_record_has_its_file(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, record(5, 9))
    follower = Follower(store, namespace, seals)
    async with follower.live as live:
        assert (live.values, live.version) == (VllmWorkerLiveOptions(), 0)
        assert follower.drops == {"unauthentic": 1} and not follower.told


@pytest.mark.parametrize("deleted", [False, True])
async def test_an_old_record_is_not_taken_again(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals, deleted: bool
):
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100}, seals=seals)
    old = await store.get(key)
    assert old is not None
    follower = Follower(store, namespace, seals)
    async with follower.live as live:
        await live_options.write(store, namespace, COMPONENT, {LENGTH: 200}, seals=seals)
        await follower.until(lambda: live.version == 2)
        if deleted:
            await store.delete(key)
            await follower.until(lambda: live.version == 0)
        await store.put(key, old)
        await follower.until(lambda: follower.drops["unauthentic"] == 1)
        assert "version 1 came after version 2" in live.refused
        assert live.version == (0 if deleted else 2)
        await live_options.write(
            store, namespace, COMPONENT, {SIZE: 3}, seals=seals, newest=live.newest
        )
        await follower.until(lambda: live.version == 3)
        assert live.values.max_prefill_queue_size == 3


async def test_the_secret_is_replaced_while_processes_follow(
    store: EtcdStore, namespace: str, key: str, tmp_path: Path
):
    path = tmp_path / "secret"

    def rewrite(*keys: bytes) -> RecordSeals:
        """As a process that starts now has it."""
        return RecordSeals(graph_secret(path, *keys))

    first = rewrite(OLD)
    await live_options.write(store, namespace, COMPONENT, {LENGTH: 100}, seals=first)
    both = rewrite(NEW, OLD)
    follower = Follower(store, namespace, both)
    async with follower.live as live:
        assert live.values.max_local_prefill_length == 100
        await live_options.write(store, namespace, COMPONENT, {}, seals=both)
        await follower.until(lambda: live.version == 2)
        assert live.values.max_local_prefill_length == 100
    late = Follower(store, namespace, rewrite(NEW))
    async with late.live as live:
        assert (live.values.max_local_prefill_length, live.version) == (100, 2)
        gone = RecordSeals(graph_secret(tmp_path / "gone", OLD))
        await store.put(key, gone.sealed(key, record(5, 9)))
        await late.until(lambda: late.drops["unauthentic"] == 1)
        assert live.version == 2


async def test_without_a_secret_sealed_and_unsealed_records_are_followed(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, seals.sealed(key, record(5, 4)))
    follower = Follower(store, namespace, UNSEALED)
    async with follower.live as live:
        assert (live.values.max_local_prefill_length, live.version) == (5, 4)
        await store.put(key, record(6, 1))
        await follower.until(lambda: live.version == 1)
    assert not follower.drops


async def test_changes_that_are_not_authentic_are_told_as_refused(
    store: EtcdStore, namespace: str, key: str, seals: RecordSeals
):
    await store.put(key, record(5, 9))
    changes = live_options.changes(store, namespace, seals)
    said = await anext(changes)
    assert isinstance(said, str) and "not authentic" in said
    await changes.aclose()
