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


def usable(links: WriterLinks, *leases: int) -> list[int]:
    members = tuple(endpoint_record(w, "PrefillWorker", "prefill") for w in leases)
    return [member.lease_id for member in links.usable(members)]


async def test_only_a_marked_link_makes_a_worker_unusable(store: Store, namespace: str):
    links, turned = WriterLinks(namespace, ENGINE), list[int]()
    first = await mark(store, namespace, A)
    await mark(store, namespace, B, engine_id="d2")
    async with links.follow(store, lambda: turned.append(1)):
        assert usable(links, A, B) == [B], "known when the context is entered"
        await store.delete(first)
        await eventually(lambda: usable(links, A, B) == [A, B])
        key = await mark(store, namespace, B)
        await eventually(lambda: usable(links, A, B) == [A])
        await store.delete(key)
        await eventually(lambda: usable(links, A, B) == [A, B])
        assert len(turned) == 4


async def test_a_worker_takes_its_links_along(store: Store, namespace: str):
    links = WriterLinks(namespace, ENGINE)
    async with links.follow(store, lambda: None):
        async with store.lease(10.0) as lease:
            await mark(store, namespace, lease.id, lease=lease)
            await eventually(lambda: not usable(links, lease.id))
        await eventually(lambda: usable(links, lease.id))


async def test_a_mark_that_the_store_has_lost_counts_when_it_is_back():
    """A worker puts its marks back; those that have ended meanwhile would not be deleted."""
    links, turned = WriterLinks("t", ENGINE), list[int]()
    async with MemoryStore() as store:
        await mark(store, "t", A)
        await mark(store, "t", B)
        async with links.follow(store, lambda: turned.append(1)):
            store.set_available(False)
            assert usable(links, A, B) == []
            store.set_available(True)  # a new listing of what is there
            store.wipe()
            await eventually(lambda: usable(links, A, B) == [A, B])
            await mark(store, "t", B)
            await eventually(lambda: usable(links, A, B) == [A])
        assert len(turned) == 3
