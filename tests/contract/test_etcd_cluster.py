"""The store on a cluster of three etcd members: the loss of one member loses nothing else."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Put, Snapshot, WatchEvent
from dynamo_lite.runtime.tasks import running
from tests.builders import eventually
from tests.clusters import EtcdCluster, etcd_cluster
from tests.servers import PrivateServer
from tests.store_outages import put_when_back

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("no_leaked_tasks")]

_TTL_S = 12.0
_SETTLED_S = 30.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EtcdCluster[PrivateServer]]:
    async with etcd_cluster(tmp_path) as made:
        yield made


class Load:
    """One process writes, another one reads and watches."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.seen: list[bytes] = []
        self.reads = 0

    async def write(self, store: EtcdStore) -> None:
        for number in itertools.count():
            value = b"%d" % number
            await put_when_back(store, "n/value", value, within_s=_SETTLED_S)
            self.written.append(value)
            await asyncio.sleep(0.01)

    async def read(self, store: EtcdStore) -> None:
        while True:
            await asyncio.sleep(0.01)
            with contextlib.suppress(StoreUnavailable):  # there is no leader
                await store.get("n/value")
                self.reads += 1

    async def follow(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            self.saw(event)

    def saw(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(entries) if (value := entries.get("n/value")) is not None:
                self.seen.append(value)  # the watch goes on at another member
            case Put("n/value", value):
                self.seen.append(value)
            case _:
                pass

    async def goes_on(self) -> None:
        """Returns when 20 more of each were possible."""
        before = len(self.written), len(self.seen), self.reads

        def enough() -> bool:
            now = len(self.written), len(self.seen), self.reads
            return all(after > had + 20 for had, after in zip(before, now, strict=True))

        try:
            await eventually(enough, _SETTLED_S)
        except TimeoutError:
            now = len(self.written), len(self.seen), self.reads
            raise AssertionError(f"written, seen, read: {before} before, {now} now") from None


async def kill(cluster: EtcdCluster[PrivateServer], name: str) -> None:
    await cluster.members[name].kill()


async def freeze(cluster: EtcdCluster[PrivateServer], name: str) -> None:
    cluster.members[name].freeze()


@pytest.mark.parametrize("stop", [kill, freeze])
async def test_a_lost_leader_costs_nothing(
    cluster: EtcdCluster[PrivateServer],
    stop: Callable[[EtcdCluster[PrivateServer], str], Awaitable[None]],
) -> None:
    load = Load()
    async with (
        EtcdStore(cluster.url) as writer,
        EtcdStore(cluster.url) as watcher,
        writer.lease(_TTL_S) as lease,
        watcher.lease(_TTL_S) as other,
        watcher.watch("n/") as events,
    ):
        assert await anext(events) == Snapshot({})
        await writer.put("n/one", b"1", lease=lease)
        await watcher.put("n/other", b"1", lease=other)
        async with running(load.follow(events), name="follow"):
            async with (
                running(load.read(watcher), name="read"),
                running(load.write(writer), name="write"),
            ):
                await load.goes_on()
                leader = await cluster.leader()
                await stop(cluster, leader)
                await load.goes_on()
                assert await cluster.leader() != leader
                # Longer than a time-to-live: a lease that was not refreshed is gone.
                await asyncio.sleep(_TTL_S + 1.0)
                assert lease.loss is None and other.loss is None
                if stop is freeze:
                    # It must not go on: an etcd before 3.5.13 that was the leader then ends all
                    # leases, because none was refreshed at it.
                    await kill(cluster, leader)
                await cluster.members[leader].restart()
                await cluster.healthy()
                await load.goes_on()
            await put_when_back(writer, "n/value", b"end", within_s=_SETTLED_S)
            await eventually(lambda: load.seen[-1] == b"end", _SETTLED_S)
        assert set(await watcher.get_prefix("n/")) == {"n/one", "n/other", "n/value"}
        # One whose answer was lost was put again, and may be seen twice, the second time also after
        # later ones: the server that has it applies it when it can.
        first = [int(value) for value in dict.fromkeys(load.seen[:-1])]
        assert first == sorted(first)


def url_of(cluster: EtcdCluster[PrivateServer], names: list[str]) -> str:
    return "http://" + ",".join(cluster.members[n].url.removeprefix("http://") for n in names)


async def test_a_lost_follower_fails_no_reading(cluster: EtcdCluster[PrivateServer]) -> None:
    """Not even a call that is in flight on its connection."""
    leader = await cluster.leader()
    follower, *_ = order = sorted(cluster.members, key=lambda name: name == leader)
    async with EtcdStore(url_of(cluster, order)) as store:
        await store.put("n/a", b"1")
        reading = [asyncio.create_task(store.get("n/a")) for _ in range(50)]
        await asyncio.sleep(0)
        await cluster.members[follower].kill()
        assert await asyncio.gather(*reading) == [b"1"] * 50
        assert await store.get_prefix("n/") == {"n/a": b"1"}


async def test_a_frozen_member_costs_no_short_lease(cluster: EtcdCluster[PrivateServer]) -> None:
    leader = await cluster.leader()
    follower, *_ = order = sorted(cluster.members, key=lambda name: name == leader)
    async with EtcdStore(url_of(cluster, order)) as store, store.lease(2) as lease:
        await freeze(cluster, follower)
        await asyncio.sleep(3.0)
        assert lease.loss is None
