"""A store that is away for a while, and one that comes back without its data."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from aetcd import rpc

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.runtime.etcd.client import EtcdClient
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.store import Lease, LeaseLoss, Put, Snapshot, Store
from dynamo_lite.serve.embedded import EmbeddedEtcd
from tests.builders import endpoint_record, eventually, members_when, register
from tests.servers import PrivateServer, private_server
from tests.store_outages import put_when_back, refreshed_once_more, take, when_back
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


class Rig(Protocol):
    """A store that a test may take away. store: one client's view of it."""

    store: Store

    async def away(self) -> None: ...

    async def back(self, *, wiped: bool = False) -> None: ...


class MemoryRig:
    def __init__(self) -> None:
        self.store = MemoryStore()

    async def away(self) -> None:
        self.store.set_available(False)

    async def back(self, *, wiped: bool = False) -> None:
        if wiped:
            self.store.wipe()
        self.store.set_available(True)


class EtcdRig:
    def __init__(self, server: PrivateServer, store: EtcdStore):
        self.server, self.store = server, store

    async def away(self) -> None:
        await self.server.kill()

    async def back(self, *, wiped: bool = False) -> None:
        await self.server.restart(wiped=wiped)


@pytest.fixture(params=["memory", "etcd"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "memory":
        yield MemoryRig()
        return
    async with (
        private_server(EmbeddedEtcd, tmp_path / "etcd") as server,
        EtcdStore(server.url) as store,
    ):
        yield EtcdRig(server, store)


async def refreshed(*leases: Lease) -> None:
    """The store answers again, and the leases are held. Each was refreshed after a tenth of its
    time-to-live before this call; that stays true, however late it is looked at."""
    began = time.monotonic()

    def is_refreshed(lease: Lease) -> bool:
        assert lease.loss is None
        since = time.monotonic() - began
        return lease.remaining_s() >= lease.ttl_s * 0.9 - since

    await eventually(lambda: all([is_refreshed(lease) for lease in leases]), 5)


# Away, and back with its data


class Outage(Protocol):
    def __call__(self, seconds: float) -> Awaitable[None]: ...


@pytest.fixture(params=["frozen", "killed"])
def outage(request: pytest.FixtureRequest, etcd_server: PrivateServer) -> Outage:
    """Lasts at least as long as asked; etcd is back when it returns."""

    async def frozen(seconds: float) -> None:
        etcd_server.freeze()
        await asyncio.sleep(seconds)
        etcd_server.thaw()

    async def killed(seconds: float) -> None:
        await etcd_server.kill()
        await asyncio.sleep(seconds)
        await etcd_server.restart()

    return frozen if request.param == "frozen" else killed


class Member:
    """A process as far as the store sees it, with a client of its own."""

    lease: Lease
    roster: Roster

    def __init__(self, url: str, ttl_s: float):
        self._url, self._ttl_s = url, ttl_s

    async def open(self, stack: AsyncExitStack) -> None:
        store = await stack.enter_async_context(EtcdStore(self._url))
        self.lease = lease = await stack.enter_async_context(store.lease(self._ttl_s))
        await register(store, endpoint_record(lease.id, "Worker", namespace="n"), lease=lease)
        self.roster = await stack.enter_async_context(
            Roster(store, names.endpoint_prefix("n", "Worker", "generate"))
        )


async def test_an_outage_shorter_than_the_lease_costs_nothing(
    etcd_server: PrivateServer, outage: Outage
) -> None:
    """Two thirds of a time-to-live; the same as 20 s of 30 s."""
    left: list[frozenset[int]] = []
    async with AsyncExitStack() as stack:
        members = [Member(etcd_server.url, 12.0) for _ in range(4)]
        for member in members:
            await member.open(stack)
        for member in members:
            await members_when(member.roster, lambda found: len(found) == 4, 5)
            member.roster.on_change(lambda joined, gone: left.append(gone))
        watcher = await stack.enter_async_context(EtcdStore(etcd_server.url))
        events = await stack.enter_async_context(watcher.watch("n/"))
        assert len((await take(events)).entries) == 4  # type: ignore[union-attr]
        await outage(8.0)
        back_at = time.monotonic()
        await refreshed(*(member.lease for member in members))
        assert time.monotonic() - back_at < 2.5
        await put_when_back(watcher, "n/end", b"")
        last = await take(events)
        if isinstance(last, Snapshot):  # a killed server has ended the watch
            assert len(last.entries.keys() - {"n/end"}) == 4
        # A lease that etcd had not prolonged would end in this time, and be reported. It ends by
        # etcd's own clock.
        await asyncio.sleep(4.0)
        for member in members:
            assert member.lease.loss is None
            assert len(member.roster.members) == 4
        assert len(await watcher.get_prefix("n/components/")) == 4
        assert left == []


async def test_calls_to_a_frozen_store_end_in_time_and_leave_nothing(
    etcd_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_lite.runtime.etcd.client.CALL_TIMEOUT_S", 0.5)
    async with EtcdStore(etcd_server.url) as store, store.lease(30) as lease:
        etcd_server.freeze()
        for _ in range(6):
            began = time.monotonic()
            assert await lease.verify() is None
            with pytest.raises(StoreUnavailable):
                await store.put("n/k", b"", lease=lease)
            assert time.monotonic() - began < 4.0
            assert len(asyncio.all_tasks()) < 8  # this one, the keepalive, and a call's own
        etcd_server.thaw()
        await refreshed(lease)


# Back without its data


async def test_a_wiped_store_gets_the_same_lease_again(rig: Rig) -> None:
    async with rig.store.lease(5) as lease:
        lease_id = lease.id
        await rig.store.put("n/own", b"1", lease=lease)
        await rig.away()
        await rig.back(wiped=True)
        assert await when_back(lambda: rig.store.get_prefix("n/")) == {}
        await refreshed_once_more(lease)
        assert lease.id == lease_id
        await rig.store.put("n/own", b"2", lease=lease)
        assert await rig.store.revoke(lease_id) is True
        assert await rig.store.get("n/own") is None
        assert await lease.verify() is LeaseLoss.REVOKED


async def test_a_key_may_be_put_back_before_the_lease_is_known_again(rig: Rig) -> None:
    async with rig.store.lease(60) as lease:  # its keepalive comes too late
        await rig.store.put("n/own", b"1", lease=lease)
        await rig.away()
        await rig.back(wiped=True)
        await put_when_back(rig.store, "n/own", b"2", lease=lease)
        assert await rig.store.create("n/own", b"3", lease=lease) is False
        assert lease.loss is None
    assert await rig.store.get_prefix("n/") == {}


async def test_a_key_of_another_lease_at_the_same_revision_is_no_revocation(rig: Rig) -> None:
    """As when another process becomes the leader first in a wiped store."""
    async with rig.store.lease(60) as lease, rig.store.lease(60) as other:
        await rig.store.put("n/leader", b"1", lease=lease)
        await rig.away()
        await rig.back(wiped=True)
        await put_when_back(rig.store, "n/leader", b"2", lease=other)
        assert await lease.verify() is None
        await put_when_back(rig.store, "n/own", b"1", lease=lease)


async def test_a_wiped_store_resyncs_the_watch(rig: Rig) -> None:
    async with rig.store.watch("n/") as events:
        assert await take(events) == Snapshot({})
        for i in range(3):
            await rig.store.put(f"n/{i}", b"x")
            assert await take(events) == Put(f"n/{i}", b"x")
        await rig.away()
        await rig.back(wiped=True)
        await put_when_back(rig.store, "n/new", b"y")
        told = await take(events)
        if told == Snapshot({}):
            assert await take(events) == Put("n/new", b"y")
        else:
            assert told == Snapshot({"n/new": b"y"})
        async with rig.store.watch("n/") as fresh:
            assert await take(fresh) == Snapshot({"n/new": b"y"})


async def test_a_lease_that_ran_out_is_not_granted_again(rig: Rig) -> None:
    async with rig.store.lease(2) as lease:
        await rig.store.put("n/own", b"1", lease=lease)
        await rig.away()
        async with asyncio.timeout(5):
            assert await lease.lost() is LeaseLoss.EXPIRED
        await rig.back(wiped=True)
        with pytest.raises(LeaseLost):
            await rig.store.put("n/own", b"2", lease=lease)
        assert await lease.verify() is LeaseLoss.EXPIRED


async def wipe(server: PrivateServer, *, others_write: int) -> None:
    await server.kill()
    await server.restart(wiped=True)
    await write_as_others(server.url, others_write)


async def write_as_others(url: str, puts: int) -> None:
    async with EtcdStore(url) as other:
        for i in range(puts):
            await other.put(f"m/{i}", b"y")


async def test_a_lease_without_keys_survives_a_wipe(etcd_server: PrivateServer) -> None:
    async with EtcdStore(etcd_server.url) as store, store.lease(5) as lease:
        await wipe(etcd_server, others_write=20)
        await refreshed_once_more(lease)
        assert await lease.verify() is None


async def compact(store: EtcdStore, key: bytes) -> None:
    client = store._client
    [kv] = (await client.call(rpc.RangeRequest(key=key))).kvs
    request = rpc.CompactionRequest(revision=kv.mod_revision, physical=True)
    await rpc.KVStub(client.channel).Compact(request)


async def test_a_revocation_after_compaction_is_one(etcd_server: PrivateServer) -> None:
    """The place in history where the lease was last seen is forgotten, but it is the same."""
    async with EtcdStore(etcd_server.url) as store, store.lease(60) as lease:
        await store.put("n/own", b"1", lease=lease)
        await write_as_others(etcd_server.url, 5)
        await compact(store, b"m/4")
        assert await store.revoke(lease.id)
        assert await lease.verify() is LeaseLoss.REVOKED


async def wipe_what_was_seen(
    server: PrivateServer, store: Store, lease: Lease, *, others_write: int
) -> None:
    """The wiped store is at an earlier revision than the lease has seen."""
    await store.put("n/own", b"1", lease=lease)
    await write_as_others(server.url, 20)
    assert await lease.verify() is None  # sees the revision of the last one
    await wipe(server, others_write=others_write)
    await when_back(lambda: store.get("n/own"))


async def test_a_compaction_after_a_wipe_hides_no_wipe(etcd_server: PrivateServer) -> None:
    """The place in history is forgotten in another store, which is behind what was seen."""
    async with EtcdStore(etcd_server.url) as store, store.lease(60) as lease:
        await wipe_what_was_seen(etcd_server, store, lease, others_write=8)
        await compact(store, b"m/7")
        assert await lease.verify() is None
        await put_when_back(store, "n/own", b"2", lease=lease)


async def test_a_revocation_after_a_repeated_grant_without_answer_is_one(
    etcd_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store that was wiped had shown does not count in the new one."""
    call = EtcdClient.call

    async def without_answer(client: EtcdClient, request: Any, *limit: float) -> Any:
        reply = await call(client, request, *limit)
        if isinstance(request, rpc.LeaseGrantRequest):
            raise TimeoutError
        return reply

    async with EtcdStore(etcd_server.url) as store, store.lease(60) as lease:
        await wipe_what_was_seen(etcd_server, store, lease, others_write=0)
        with monkeypatch.context() as patch:
            patch.setattr(EtcdClient, "call", without_answer)
            assert await lease.verify() is None
        await store.put("n/own", b"2", lease=lease)
        await write_as_others(etcd_server.url, 5)
        await compact(store, b"m/4")
        assert await store.revoke(lease.id)
        assert await lease.verify() is LeaseLoss.REVOKED


@pytest.mark.parametrize("ahead", [0, 20])
async def test_looks_at_a_wiped_store_at_a_time_agree(
    etcd_server: PrivateServer, ahead: int
) -> None:
    """Also where its revision alone would say that nothing was lost."""
    async with EtcdStore(etcd_server.url) as store, store.lease(60) as lease:
        await store.put("n/own", b"1", lease=lease)
        await wipe(etcd_server, others_write=ahead)
        await when_back(lambda: store.get("n/own"))
        looks: list[asyncio.Task[LeaseLoss | None]] = []
        for _ in range(8):
            # Each begins a round trip after the one before, which is not over then.
            looks += [asyncio.create_task(lease.verify()) for _ in range(2)]
            await store.get("n/other")
        assert await asyncio.gather(*looks) == [None] * 16
        await put_when_back(store, "n/own", b"2", lease=lease)
        assert lease.loss is None
