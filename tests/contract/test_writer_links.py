"""The links to one decode engine, as it follows them on every store."""

import pytest

from dynamo_lite.disagg.decode.prefill_workers import WriterLinks
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.store import Lease, Store
from tests.builders import endpoint_record, eventually
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

ENGINE, A, B = "d1", 0x1A, 0x2B


async def mark(
    store: Store,
    namespace: str,
    lease_id: int,
    *,
    engine_id: str = ENGINE,
    lease: Lease | None = None,
) -> str:
    """Returns the key."""
    key = names.link_key(namespace, lease_id, engine_id)
    link = LinkRecord(
        prefill_lease_id=lease_id,
        engine_id=engine_id,
        decode_lease_id=7,
        detail=f"broken from {lease_id:x}",
    )
    await store.put(key, encode_json(link), lease=lease)
    return key


async def test_only_a_failed_link_makes_a_worker_unusable(store: Store, namespace: str):
    links, turned = WriterLinks(namespace, ENGINE), list[int]()
    first = await mark(store, namespace, A)
    async with links.follow(store, lambda: turned.append(1)):
        assert links.trouble(A) == "broken from 1a", "known when the context is entered"
        members = tuple(endpoint_record(w, "PrefillWorker", "prefill") for w in (A, B))
        assert [m.lease_id for m in links.usable(members)] == [B]
        await store.delete(first)
        await eventually(lambda: not links.trouble(A))
        key = await mark(store, namespace, B)
        await eventually(lambda: links.trouble(B))
        assert [m.lease_id for m in links.usable(members)] == [A]
        await store.delete(key)
        await eventually(lambda: not links.trouble(B))
        assert len(turned) == 4


async def test_links_of_others_and_malformed_ones_count_for_nothing(store: Store, namespace: str):
    dropped: list[str] = []
    links = WriterLinks(namespace, ENGINE, dropped.append)
    prefix = names.links_prefix(namespace)
    await mark(store, namespace, A, engine_id="d2")
    await store.put(f"{prefix}nonsense", b"[]")
    await store.put(f"{prefix}xyz:{ENGINE}", b"{}")
    async with links.follow(store, lambda: None):
        assert not links.trouble(A) and dropped == ["record"]
        failed = await mark(store, namespace, A)
        await eventually(lambda: links.trouble(A))
        # What was known of that worker holds no more: its record cannot be read.
        await store.put(failed, b"\xff{")
        await eventually(lambda: not links.trouble(A))
        stolen = LinkRecord(prefill_lease_id=B, engine_id=ENGINE, decode_lease_id=7, detail="x")
        await store.put(failed, encode_json(stolen))
        await eventually(lambda: len(dropped) == 3)
        assert not links.trouble(A) and not links.trouble(B)


async def test_a_worker_takes_its_links_along(store: Store, namespace: str):
    links = WriterLinks(namespace, ENGINE)
    async with links.follow(store, lambda: None):
        async with store.lease(10.0) as lease:
            await mark(store, namespace, lease.id, lease=lease)
            await eventually(lambda: links.trouble(lease.id))
        await eventually(lambda: not links.trouble(lease.id))


async def test_a_mark_that_the_store_has_lost_counts_when_it_is_back():
    """A worker puts its marks back; those that have ended meanwhile would not be deleted."""
    links, turned = WriterLinks("t", ENGINE), list[int]()
    async with MemoryStore() as store:
        await mark(store, "t", A)
        await mark(store, "t", B)
        async with links.follow(store, lambda: turned.append(1)):
            store.set_available(False)
            assert links.trouble(A) and links.trouble(B)
            store.set_available(True)  # a new listing of what is there
            store.wipe()
            await eventually(lambda: not links.trouble(A) and not links.trouble(B))
            await mark(store, "t", B)
            await eventually(lambda: links.trouble(B))
            assert not links.trouble(A)
        assert len(turned) == 3
