"""The roster on every store."""

import asyncio

import msgspec
import pytest

from dynamo_lite.protocol.codec import WIRE_VERSION, encode_json
from dynamo_lite.protocol.names import endpoint_prefix
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.store import Store
from tests.builders import endpoint_record, key_of, members_when
from tests.twins.servers import MemoryStore
from tests.unit.virtual import virtual

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def put(store: Store, namespace: str, lease_id: int, model: str = "") -> EndpointRecord:
    member = endpoint_record(lease_id, "Worker", namespace=namespace, model=model)
    key = key_of(member)
    await store.put(key, encode_json(member))
    return member


async def test_members_join_change_and_leave(store: Store, namespace: str) -> None:
    first = await put(store, namespace, 0x1A)
    changes: list[tuple[set[int], set[int]]] = []
    async with Roster(store, endpoint_prefix(namespace, "Worker", "generate")) as roster:
        roster.on_change(lambda joined, left: changes.append((set(joined), set(left))))
        assert roster.members == (first,)
        second = await put(store, namespace, 0x2B)
        assert await members_when(roster, lambda members: len(members) == 2, 5) == (first, second)
        assert roster.get(0x2B) == second
        changed = await put(store, namespace, 0x2B, model="m")
        await members_when(roster, lambda members: changed in members, 5)
        await store.delete(key_of(endpoint_record(0x1A, "Worker", namespace=namespace)))
        await members_when(roster, lambda members: len(members) == 1, 5)
        assert roster.get(0x1A) is None
    assert changes == [({0x2B}, set()), (set(), {0x1A})]


async def test_malformed_records_and_those_of_another_wire_version_are_no_members(
    store: Store, namespace: str
) -> None:
    drops: list[str] = []
    prefix = endpoint_prefix(namespace, "Worker", "generate")
    await store.put(f"{prefix}8", b"\xff{")
    await store.put(f"{prefix}9", encode_json(endpoint_record(4, "Worker", namespace=namespace)))
    for lease_id, wire_version in ((1, WIRE_VERSION), (2, WIRE_VERSION + 1), (3, 0)):
        plain = endpoint_record(lease_id, "Worker", namespace=namespace)
        record = msgspec.structs.replace(plain, wire_version=wire_version)
        await store.put(key_of(record), encode_json(record))
    async with Roster(store, prefix, drops.append) as roster:
        assert [member.lease_id for member in roster.members] == [1]
    assert sorted(drops) == ["record", "record", "version", "version"]


async def test_members_stay_during_an_outage_and_leave_after_it(etcd_server) -> None:
    async with EtcdStore(etcd_server.url) as store:
        member = await put(store, "n", 0x1)
        async with Roster(store, endpoint_prefix("n", "Worker", "generate")) as roster:
            await etcd_server.kill()
            with pytest.raises(TimeoutError):
                await members_when(roster, lambda members: not members, 0.3)
            assert roster.members == (member,)
            await etcd_server.restart(wiped=True)
            assert await members_when(roster, lambda members: not members, 10) == ()


@virtual
async def test_members_have_a_while_to_come_back_to_a_store_that_lost_its_data() -> None:
    store, prefix = MemoryStore(), endpoint_prefix("n", "Worker", "generate")
    members = [await put(store, "n", lease_id) for lease_id in (1, 2, 3)]
    left: list[set[int]] = []
    drops: list[str] = []
    async with Roster(store, prefix, drops.append) as roster:
        roster.on_change(lambda joined, gone: left.append(set(gone)))
        store.set_available(False)
        store.wipe()
        store.set_available(True)
        await put(store, "n", 1)
        await put(store, "n", 4)
        await members_when(roster, lambda found: len(found) == 4, 5)
        assert roster.members[:3] == tuple(members)
        assert left == [set()]
        await store.put(key_of(endpoint_record(2, "Worker", namespace="n")), b"nonsense")
        await members_when(roster, lambda found: members[1] not in found, 10)
        await members_when(roster, lambda found: members[2] not in found, 10)
        assert [member.lease_id for member in roster.members] == [1, 4]
        assert left == [set(), {2}, {3}]
        assert drops == ["record"]


@virtual
async def test_a_lost_member_leaves_though_the_watch_lists_again_and_again() -> None:
    store = MemoryStore()
    await put(store, "n", 1)
    async with Roster(store, endpoint_prefix("n", "Worker", "generate")) as roster:
        store.wipe()
        for _ in range(6):
            await asyncio.sleep(1)
            store.set_available(False)
            store.set_available(True)
        assert roster.members == ()


async def test_a_roster_may_be_closed_while_members_are_doubted() -> None:
    store = MemoryStore()
    await put(store, "n", 1)
    async with Roster(store, endpoint_prefix("n", "Worker", "generate")) as roster:
        async with store.watch("") as events:
            await anext(events)
            store.wipe()
            await anext(events)
        assert len(roster.members) == 1
