"""What every store must do; and what etcd must do when its server dies, hangs or is wiped."""

import asyncio
import time

import pytest

from dynamo_lite.protocol.errors import LeaseLost, StartupError, StoreUnavailable
from dynamo_lite.runtime.clock import Clock, boottime
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Delete, LeaseLoss, Put, Snapshot, Store, WatchEvent
from tests.builders import eventually
from tests.store_outages import put_when_back, take

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


# Keys


async def test_values_come_back_and_go(store: Store, namespace: str) -> None:
    key = f"{namespace}/a"
    assert await store.get(key) is None
    await store.put(key, b"\x00\xff")
    await store.put(f"{namespace}/b", b"")
    assert await store.get(key) == b"\x00\xff"
    assert await store.get_prefix(f"{namespace}/") == {key: b"\x00\xff", f"{namespace}/b": b""}
    assert await store.delete(key) is True
    assert await store.delete(key) is False


async def test_only_one_create_wins(store: Store, namespace: str) -> None:
    tries = [store.create(f"{namespace}/one", str(i).encode()) for i in range(20)]
    won = await asyncio.gather(*tries)
    assert won.count(True) == 1
    assert await store.get(f"{namespace}/one") == str(won.index(True)).encode()


async def test_a_swap_needs_the_value_that_it_replaces(store: Store, namespace: str) -> None:
    key = f"{namespace}/swapped"
    assert await store.swap(key, b"0", b"1") is False
    assert await store.get(key) is None
    assert await store.swap(key, None, b"1") is True
    assert await store.swap(key, None, b"2") is False
    assert await store.swap(key, b"1", b"\x00") is True
    tries = [store.swap(key, b"\x00", str(i).encode()) for i in range(20)]
    won = await asyncio.gather(*tries)
    assert won.count(True) == 1
    assert await store.get(key) == str(won.index(True)).encode()


async def test_what_was_swapped_hangs_on_no_lease(store: Store, namespace: str) -> None:
    key = f"{namespace}/swapped"
    async with store.lease(5) as lease:
        await store.put(key, b"1", lease=lease)
        assert await store.swap(key, b"1", b"2")
    assert await store.get(key) == b"2"


# Leases


async def test_a_closed_lease_takes_its_keys_along(store: Store, namespace: str) -> None:
    async with store.lease(5) as lease:
        assert lease.loss is None
        assert 0 < lease.remaining_s() <= lease.ttl_s
        await store.put(f"{namespace}/put", b"1", lease=lease)
        assert await store.create(f"{namespace}/created", b"1", lease=lease)
        await store.put(f"{namespace}/free", b"1")
        assert await lease.verify() is None
    assert lease.loss is LeaseLoss.CLOSED
    assert await lease.lost() is LeaseLoss.CLOSED
    assert await store.get_prefix(f"{namespace}/") == {f"{namespace}/free": b"1"}


async def test_a_lease_counts_for_no_longer_than_was_asked(store: Store) -> None:
    """etcd grants whole seconds; a decode engine releases the blocks of a lost writer by what was
    asked for."""
    async with store.lease(2.5) as lease:
        assert lease.ttl_s == 2.5
        assert await lease.verify() is None
        assert 0 < lease.remaining_s() <= 2.5


async def test_a_revoked_lease_is_noticed_on_verify(store: Store, namespace: str) -> None:
    async with store.lease(30) as lease, store.watch(f"{namespace}/") as events:
        assert await take(events) == Snapshot({})
        await store.put(f"{namespace}/own", b"1", lease=lease)
        assert await take(events) == Put(f"{namespace}/own", b"1")
        started = time.monotonic()
        assert await store.revoke(lease.id) is True
        assert await take(events) == Delete(f"{namespace}/own")
        assert await lease.verify() is LeaseLoss.REVOKED
        assert await lease.lost() is LeaseLoss.REVOKED
        assert time.monotonic() - started < 2.0  # its next keepalive is 3 s away
        assert lease.remaining_s() == 0
        with pytest.raises(LeaseLost):
            await store.put(f"{namespace}/late", b"1", lease=lease)
        with pytest.raises(LeaseLost):
            await store.create(f"{namespace}/late", b"1", lease=lease)
        assert await store.revoke(lease.id) is False


# Watches


async def test_a_watch_lists_and_then_tells_in_order(store: Store, namespace: str) -> None:
    prefix = f"{namespace}/"
    await store.put(f"{prefix}old", b"0")
    async with store.watch(prefix) as events:
        assert await take(events) == Snapshot({f"{prefix}old": b"0"})
        await store.put(f"{namespace}-other/x", b"0")
        for i in range(50):
            await store.put(f"{prefix}{i % 5}", str(i).encode())
        await store.delete(f"{prefix}old")
        told = [await take(events) for _ in range(51)]
    expected: list[WatchEvent] = [Put(f"{prefix}{i % 5}", str(i).encode()) for i in range(50)]
    assert told == [*expected, Delete(f"{prefix}old")]


# etcd's own ways to fail


async def test_a_watch_goes_on_after_kill_9(etcd_server) -> None:
    async with EtcdStore(etcd_server.url) as store, store.watch("n/") as events:
        assert await take(events) == Snapshot({})
        written: list[str] = []
        for round_ in range(3):
            for i in range(10):
                await put_when_back(store, f"n/{round_}-{i}", b"x")
                written.append(f"n/{round_}-{i}")
            await etcd_server.kill()
            with pytest.raises(StoreUnavailable):
                await store.get("n/0")
            await etcd_server.restart()
        await put_when_back(store, "n/last", b"x")
        shown: dict[str, bytes] = {}
        while set(shown) != {*written, "n/last"}:
            match await take(events):
                case Snapshot(entries):
                    assert shown.keys() <= entries.keys()
                    shown = entries
                case Put(key, value):
                    shown[key] = value


async def test_a_lease_expires_by_the_local_clock(
    etcd_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_lite.runtime.etcd.client.CALL_TIMEOUT_S", 0.5)
    async with EtcdStore(etcd_server.url) as store, store.lease(2) as lease:
        started = time.monotonic()
        await etcd_server.kill()
        async with asyncio.timeout(5):
            assert await lease.lost() is LeaseLoss.EXPIRED
        assert time.monotonic() - started < lease.ttl_s + 2.0
        assert lease.remaining_s() == 0


async def test_a_stall_that_is_longer_than_the_lease_costs_it(etcd_server) -> None:
    """Another process sees the member go, and the stalled one knows it when it runs again."""
    # Real time: etcd ends leases by its own clock, and counts them in whole seconds.
    async with EtcdStore(etcd_server.url) as store, store.lease(2) as lease:
        await store.put("n/own", b"1", lease=lease)
        time.sleep(lease.ttl_s * 2 + 1)  # the stall
        assert lease.loss is LeaseLoss.EXPIRED
        assert await lease.lost() is LeaseLoss.EXPIRED

        async def gone() -> bool:
            return await store.get("n/own") is None

        await eventually(gone, 5)


async def test_a_suspended_host_has_lost_its_lease(etcd_server) -> None:
    """CLOCK_MONOTONIC stops during a suspend; CLOCK_BOOTTIME does not."""
    suspended_s = 0.0
    clock = Clock(boottime=lambda: boottime() + suspended_s)
    async with EtcdStore(etcd_server.url, clock=clock) as store, store.lease(30) as lease:
        assert lease.loss is None
        suspended_s = 31.0
        assert lease.remaining_s() == 0
        assert lease.loss is LeaseLoss.EXPIRED
        assert await lease.verify() is LeaseLoss.EXPIRED


async def test_a_missing_server_is_named_without_credentials() -> None:
    store = EtcdStore("http://me:secret@127.0.0.1:1", connect_timeout_s=0.2)
    with pytest.raises(StartupError, match=r"http://127\.0\.0\.1:1") as failure:
        await store.__aenter__()
    assert "secret" not in str(failure.value)
    with pytest.raises(StoreUnavailable):
        await store.get("k")
