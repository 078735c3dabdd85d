"""Metadata of decode engines: loaded once, kept while they live, never stale."""

import asyncio

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import ProtocolError, StoreUnavailable
from dynamo_lite.protocol.records import encode_engine
from dynamo_lite.transfer.directory import MetadataDirectory
from tests.builders import engine_metadata, rank_metadata
from tests.twins.servers import MemoryStore


class SlowStore(MemoryStore):
    """Counts reads, and answers them only when the test releases them."""

    def __init__(self):
        super().__init__()
        self.reads: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = asyncio.Event()

    async def get(self, key):
        self.reads.append(key)
        value = await super().get(key)
        self.asked.set()
        await self.may_answer.wait()
        return value


def metadata(engine_id, lease_id):
    ranks = (rank_metadata(b"\x00\xff"),)
    return engine_metadata(engine_id, lease_id, fingerprint={"model": "m"}, ranks=ranks)


async def put(store, engine_id, lease_id):
    record = metadata(engine_id, lease_id)
    await store.put(names.nixl_metadata_key("t", engine_id), encode_engine(record))
    return record


@pytest.fixture
async def store():
    return SlowStore()


@pytest.fixture
async def directory(store):
    return MetadataDirectory(store, "t")


async def test_an_engine_is_read_once_and_comes_back_whole(store, directory):
    record = await put(store, "e1", 7)
    assert await directory.get("e1") == record
    assert await directory.get("e1") is await directory.get("e1")
    assert store.reads == ["t/nixl_metadata/e1"]


async def test_jobs_that_meet_a_new_engine_together_read_it_once(store, directory):
    record = await put(store, "e1", 7)
    store.may_answer.clear()
    jobs = [asyncio.create_task(directory.get("e1")) for _ in range(5)]
    await store.asked.wait()
    store.may_answer.set()
    assert await asyncio.gather(*jobs) == [record] * 5
    assert len(store.reads) == 1


async def test_an_absent_engine_is_asked_for_again(store, directory):
    assert await directory.get("e1") is None
    record = await put(store, "e1", 7)
    assert await directory.get("e1") == record


@pytest.mark.parametrize("name", ["", "../components/x", "a b", "x" * 65, "-x"])
async def test_a_name_that_no_engine_has_is_not_looked_up(store, directory, name):
    assert await directory.get(name) is None
    assert store.reads == []


async def test_engines_of_lost_leases_are_forgotten_and_no_others(store, directory):
    for engine_id, lease_id in [("e1", 7), ("e2", 7), ("e3", 8)]:
        await put(store, engine_id, lease_id)
        await directory.get(engine_id)
    assert sorted(directory.forget_leases(frozenset({7, 99}))) == ["e1", "e2"]
    assert directory.forget_leases(frozenset({7})) == []
    await store.delete(names.nixl_metadata_key("t", "e1"))
    assert await directory.get("e1") is None
    reads = len(store.reads)
    assert (await directory.get("e3")).lease_id == 8
    assert len(store.reads) == reads


async def test_an_engine_that_leaves_while_it_is_read_is_not_kept(store, directory):
    await put(store, "e1", 7)
    await put(store, "e2", 8)
    store.may_answer.clear()
    job = asyncio.create_task(directory.get("e1"))
    other = asyncio.create_task(directory.get("e2"))
    await store.asked.wait()
    directory.forget_leases(frozenset({7}))
    store.may_answer.set()
    assert await job is None
    assert (await other).engine_id == "e2"
    await store.delete(names.nixl_metadata_key("t", "e1"))
    assert await directory.get("e1") is None


async def test_a_store_out_of_reach_raises_and_is_not_remembered(store, directory):
    record = await put(store, "e1", 7)
    store.set_available(False)
    with pytest.raises(StoreUnavailable):
        await directory.get("e1")
    store.set_available(True)
    assert await directory.get("e1") == record
    store.set_available(False)
    assert await directory.get("e1") == record


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"not json",
        b'{"engine_id": 3}',
        b"\xff\xfe",
        encode_json(metadata("e1", 7)),  # without a checksum
        encode_engine(metadata("e2", 7)),  # of another engine
    ],
)
async def test_a_malformed_record_raises(store, directory, raw):
    await store.put(names.nixl_metadata_key("t", "e1"), raw)
    with pytest.raises(ProtocolError):
        await directory.get("e1")
    record = await put(store, "e1", 7)
    assert await directory.get("e1") == record
