"""What `ps --links` reads from a real etcd."""

from dynamo_lite.cli.listing import Place, link_rows
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from tests.builders import endpoint_record, engine_metadata, register


async def test_pairs_are_those_of_live_workers(etcd_url: str, namespace: str):
    place = Place(etcd_url=etcd_url, namespace=namespace)
    assert await link_rows(place) == []
    async with EtcdStore(etcd_url) as store, store.lease(10.0) as lease:
        worker = endpoint_record(lease.id, "PrefillWorker", "prefill", namespace=namespace)
        await register(store, worker, lease=lease)
        other = endpoint_record(0xF, "PrefillWorker", "prefill", namespace=namespace)
        await register(store, other, lease=lease)
        await register(store, endpoint_record(0x1, "VllmWorker", namespace=namespace))
        for engine_id, number in (("d1", 2), ("d2", 1)):
            engine = engine_metadata(engine_id, number)
            await store.put(names.nixl_metadata_key(namespace, engine_id), encode_json(engine))
        await store.put(names.nixl_metadata_key(namespace, "d3"), b"{}")
        link = LinkRecord(
            prefill_lease_id=lease.id, engine_id="d1", decode_lease_id=2, detail="broken"
        )
        await store.put(names.link_key(namespace, lease.id, "d1"), encode_json(link), lease=lease)
        await store.put(f"{names.links_prefix(namespace)}x", b"[]")

        found = [(row["prefill"], row["decode"], row["state"]) for row in await link_rows(place)]
        mine = f"{lease.id:x}"
        assert found == [
            (mine, "1", "ok"),
            (mine, "2", "failed"),
            ("f", "1", "ok"),
            ("f", "2", "ok"),
        ]
    assert await link_rows(place) == []
