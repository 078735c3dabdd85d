"""What clients see of servers that are cut off, or that come back without their data at a bad time.
Of ones that die or stop: the conformance suites, which run on these servers, too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.errors import BrokerUnavailable
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import LeaseLoss
from tests.builders import eventually
from tests.sim.servers import SimEtcd, SimNats
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import ETCD_URL, etcd_options
from tests.simulation.servers.nats_server import URL


class Cluster:
    def __init__(self, loop: VirtualLoop):
        self.loop, self.network = loop, Network(loop)
        self.nats, self.etcd = SimNats(self.network), SimEtcd(self.network)


@pytest.fixture
async def cluster(loop: VirtualLoop) -> Cluster:
    return Cluster(loop)


@pytest.fixture
async def store(cluster: Cluster) -> AsyncIterator[EtcdStore]:
    async with EtcdStore(ETCD_URL, **etcd_options(cluster.network)) as store:
        yield store


# The queue


@pytest.fixture
async def queues(cluster: Cluster) -> AsyncIterator[tuple[JetStreamQueue, JetStreamQueue]]:
    config = QueueConfig()
    async with AsyncExitStack() as stack:
        pair = [JetStreamQueue(URL, "q", config) for _ in range(2)]
        for queue in pair:
            await stack.enter_async_context(queue)
        yield pair[0], pair[1]


async def test_a_push_without_an_answer_is_ambiguous(
    cluster: Cluster, queues: tuple[JetStreamQueue, JetStreamQueue]
):
    decode, prefill = queues
    cluster.network.cut("nats")
    with pytest.raises(BrokerUnavailable):
        await decode.push(b"a", message_id="a")
    cluster.network.heal("nats")
    job = await prefill.pull(timeout_s=5)
    assert job is not None and job.payload == b"a"
    await job.ack()

    async def is_empty() -> bool:
        return (await decode.depth()).jobs == 0

    await eventually(is_empty)


# The store


async def test_a_lease_without_keys_is_not_taken_for_revoked_by_a_wiped_store_that_is_ahead(
    cluster: Cluster, store: EtcdStore
):
    """A process has no keys until its model is loaded."""
    async with store.lease(10) as lease:
        await cluster.etcd.restart(wiped=True, same_cluster=True)
        for i in range(20):
            cluster.etcd.server.put(f"m/{i}", b"")
        await asyncio.sleep(3)
        assert lease.loss is None
        await store.put("n/own", b"1", lease=lease)
        assert cluster.etcd.server.revoke(lease.id)
        assert await lease.lost() is LeaseLoss.REVOKED


async def test_a_lease_without_its_keys_is_not_taken_for_revoked_by_a_store_that_is_wiped_twice(
    cluster: Cluster, store: EtcdStore
):
    """The second time others put the same keys at the same revisions."""

    def others_are_back() -> None:
        for i in range(3):
            cluster.etcd.server.put(f"n/{i}", b"1")

    async with store.lease(10) as lease:
        await store.put("n/own", b"1", lease=lease)
        for _ in range(2):
            await cluster.etcd.restart(wiped=True, same_cluster=True)
            others_are_back()
            await eventually(lambda: lease.id in cluster.etcd.data.leases)
        assert lease.loss is None
        await store.put("n/own", b"1", lease=lease)
        assert cluster.etcd.server.revoke(lease.id)
        assert await lease.lost() is LeaseLoss.REVOKED
