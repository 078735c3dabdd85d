"""The prefill workers with a link to one decode engine, as it follows them on every store."""

import pytest

from dynamo_lite.disagg.decode.prefill_workers import PrefillWorkers
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.store import Lease, Store
from tests.builders import DECODE_ROLE, endpoint_record, engine_config, eventually, register
from tests.twins.servers import MemoryMessaging, MemoryStore

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


async def register_all(store: Store, namespace: str, *leases: int) -> PrefillWorkers:
    """The engine's view of these prefill workers, who are registered."""
    for lease_id in leases:
        record = endpoint_record(lease_id, "PrefillWorker", "prefill", namespace=namespace)
        await register(store, record)
    return PrefillWorkers(engine_config(DECODE_ROLE, namespace=namespace, engine_id=ENGINE))


def usable(workers: PrefillWorkers) -> list[int]:
    return [member.lease_id for member in workers.usable]


async def test_only_a_marked_link_makes_a_worker_unusable(store: Store, namespace: str):
    workers, turned = await register_all(store, namespace, A, B), list[int]()
    first = await mark(store, namespace, A)
    await mark(store, namespace, B, engine_id="d2")
    async with workers.follow(store, MemoryMessaging(), lambda *_: turned.append(1)):
        assert usable(workers) == [B], "known when the context is entered"
        turned.clear()
        await store.delete(first)
        await eventually(lambda: usable(workers) == [A, B])
        key = await mark(store, namespace, B)
        await eventually(lambda: usable(workers) == [A])
        await store.delete(key)
        await eventually(lambda: usable(workers) == [A, B])
        assert len(turned) == 3


async def test_a_worker_takes_its_links_along(store: Store, namespace: str):
    workers = await register_all(store, namespace, A)
    async with workers.follow(store, MemoryMessaging(), lambda *_: None):
        async with store.lease(10.0) as lease:
            await mark(store, namespace, A, lease=lease)
            await eventually(lambda: not usable(workers))
        await eventually(lambda: usable(workers) == [A])


async def test_a_mark_that_the_store_has_lost_counts_when_it_is_back():
    """A worker puts its marks back; those that have ended meanwhile would not be deleted."""
    async with MemoryStore() as store:
        workers, turned = await register_all(store, "t", A, B), list[int]()
        await mark(store, "t", A)
        await mark(store, "t", B)
        async with workers.follow(store, MemoryMessaging(), lambda *_: turned.append(1)):
            turned.clear()
            store.set_available(False)
            assert usable(workers) == []
            store.set_available(True)  # a new listing of what is there
            store.wipe()
            await eventually(lambda: usable(workers) == [A, B])
            await mark(store, "t", B)
            await eventually(lambda: usable(workers) == [A])
        assert len(turned) == 2
