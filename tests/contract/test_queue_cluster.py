"""PrefillQueue on a cluster of three NATS servers: the contract, and the loss of a server."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_lite.disagg.decision.lanes import Lane
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import BrokerUnavailable, QueueFull, StartupError
from dynamo_lite.runtime.tasks import running as owned
from tests.builders import eventually
from tests.clusters import NatsCluster, nats_cluster
from tests.conftest import running
from tests.contract import test_queue
from tests.contract.test_queue import pull, push, push_again
from tests.servers import PrivateServer, jetstream_of
from tests.sim import contract

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("no_leaked_tasks")]

globals().update(contract.tests_of(test_queue, "open_queue"))
# Here there is room some time after an ack, and a lane shows a job some time after its push: the
# servers have to agree.
del test_earlier_lanes_go_first_and_each_keeps_its_order  # type: ignore[name-defined]  # noqa: F821
del test_a_long_job_is_not_passed_over_for_ever  # type: ignore[name-defined]  # noqa: F821
del test_the_cap_is_exact, test_lanes_share_the_cap_the_ids_and_the_end  # type: ignore[name-defined]  # noqa: F821

THREE = QueueConfig(replicas=3)
#: An election of nats-server takes up to 9 s.
ELECTED_S = 45.0


def queue_of(url: str, namespace: str, config: QueueConfig = THREE) -> JetStreamQueue:
    return JetStreamQueue(url, namespace, config)


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(nats_cluster(tmp_path_factory.mktemp("cluster"))) as url:
        yield url


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster[PrivateServer]]:
    async with nats_cluster(tmp_path) as made:
        yield made


@pytest.fixture(params=["memory", "file"])
async def open_queue(
    request: pytest.FixtureRequest, cluster_url: str, namespace: str
) -> AsyncIterator[test_queue.Opener]:
    async with AsyncExitStack() as stack:

        async def open_one(config: QueueConfig = test_queue.DEFAULT) -> PrefillQueue:
            if config.push_timeout_s == test_queue.DEFAULT.push_timeout_s:
                config = replace(config, push_timeout_s=test_queue.PUSH_TIMEOUT_S)
            replicated = replace(config, replicas=3, storage=request.param)
            return await stack.enter_async_context(queue_of(cluster_url, namespace, replicated))

        yield open_one


# A server is lost


#: Of a job. One that was on its way to a worker when a server died stays for so long.
LIFE_S = 4.0


async def push_for_certain(queue: PrefillQueue, payload: bytes, message_id: str) -> None:
    """With the same id, so that a job whose push was ambiguous is not queued twice."""
    while True:
        try:
            await queue.push(payload, message_id=message_id, life_s=LIFE_S)
            return
        except (BrokerUnavailable, QueueFull):
            await asyncio.sleep(0.05)


async def test_no_job_arrives_twice_or_stays_while_servers_are_killed(
    cluster: NatsCluster[PrivateServer], namespace: str
) -> None:
    """The leader of the stream is killed under load, comes back, then the next leader."""
    config = QueueConfig(replicas=3, max_jobs=8)
    arrived: list[bytes] = []
    numbers = itertools.count()
    async with AsyncExitStack() as stack:
        users = [
            await stack.enter_async_context(queue_of(cluster.url, namespace, config))
            for _ in range(4)
        ]
        pushed: list[bytes] = []
        enough = asyncio.Event()

        async def produce(queue: PrefillQueue) -> None:
            while not enough.is_set():
                payload = b"%d" % next(numbers)
                await push_for_certain(queue, payload, payload.decode())
                pushed.append(payload)

        async def consume(queue: PrefillQueue) -> None:
            while True:
                job = await queue.pull(timeout_s=1.0)
                if job is not None:
                    arrived.append(job.payload)
                    with contextlib.suppress(BrokerUnavailable):
                        await job.ack()

        for queue in users[2:]:
            await stack.enter_async_context(owned(consume(queue), name="consume"))
        producing = [
            await stack.enter_async_context(owned(produce(queue), name="produce"))
            for queue in users[:2]
        ]
        for _ in range(2):
            await made_progress(arrived)
            leader = await cluster.leader(names.prefill_stream(namespace))
            await cluster.members[leader].kill()
            await made_progress(arrived)
            await cluster.members[leader].restart()
            await cluster.current(names.prefill_stream(namespace))
        enough.set()
        await asyncio.gather(*producing)
        await eventually(lambda: has(users[0], 0), ELECTED_S)
        assert len(arrived) == len(set(arrived)) and set(arrived) <= set(pushed)
        # Those that were on the way to a worker are lost with a server.
        assert len(pushed) - len(arrived) <= 2 * len(Lane) * 2


async def made_progress(arrived: list[bytes]) -> None:
    before = len(arrived)
    await eventually(lambda: len(arrived) >= before + 50, ELECTED_S)


async def has(queue: PrefillQueue, jobs: int) -> bool:
    """False while it is unknown, because the stream's leader is being elected."""
    try:
        return (await queue.depth()).jobs == jobs
    except BrokerUnavailable:
        return False


async def test_the_cap_is_exact_also_when_the_leader_is_killed(
    cluster: NatsCluster[PrivateServer], namespace: str
) -> None:
    config = QueueConfig(replicas=3, max_jobs=10, push_timeout_s=2.0)
    async with (
        queue_of(cluster.url, namespace, config) as one,
        queue_of(cluster.url, namespace, config) as other,
    ):
        for _ in range(5):
            await push(one, b"before")
        leader = await cluster.leader(names.prefill_stream(namespace))
        held = await pull(other)
        pushing = [
            asyncio.create_task(push(queue, b"during")) for _ in range(20) for queue in (one, other)
        ]
        await cluster.members[leader].kill()
        outcomes = await asyncio.gather(*pushing, return_exceptions=True)
        expected = (int, QueueFull, BrokerUnavailable)
        assert all(isinstance(outcome, expected) for outcome in outcomes)
        confirmed = {outcome for outcome in outcomes if isinstance(outcome, int)}
        await cluster.leader(names.prefill_stream(namespace))
        async with asyncio.timeout(ELECTED_S):
            with pytest.raises(QueueFull):
                while True:
                    await push_again(one, b"after")
            # A killed server may not have replicated its last delivery.
            found = {held.sequence}
            while len(found) < 10 or not confirmed <= found:
                if (job := await other.pull(timeout_s=1.0)) is not None:
                    found.add(job.sequence)
        await eventually(lambda: has(one, 10), ELECTED_S)
        assert len(found) == 10


async def test_a_queue_without_replicas_that_a_cluster_lost_takes_jobs_again(
    cluster: NatsCluster[PrivateServer], namespace: str
) -> None:
    """The cluster makes the stream again by itself, with the same times and the same numbers."""
    stream, config = names.prefill_stream(namespace), QueueConfig()
    async with (
        queue_of(cluster.url, namespace, config) as decode,
        queue_of(cluster.url, namespace, config) as prefill,
    ):
        await push(decode, b"lost")
        holder = cluster.members[await cluster.leader(stream)]
        await holder.kill()
        await holder.restart()
        await eventually(lambda: has(decode, 0), ELECTED_S)
        async with asyncio.timeout(ELECTED_S):
            await push_again(decode, b"new")
            # Its connection may come back later than the other one's.
            job = await pull(prefill, ELECTED_S)
        assert job.payload == b"new"


# What a cluster has to be


async def test_replicas_need_a_cluster(nats_server: PrivateServer, namespace: str) -> None:
    with pytest.raises(StartupError) as refused:
        await queue_of(nats_server.url, namespace).__aenter__()
    assert str(refused.value) == (
        "queue.replicas is 3, and NATS is a single server, not a cluster; name the servers of a "
        "cluster of at least 3 with --nats-url, or set queue.replicas to 1"
    )


async def test_replicas_need_as_many_servers(cluster_url: str, namespace: str) -> None:
    with pytest.raises(StartupError, match=r"no 5 servers with JetStream .* lower queue\.replicas"):
        await queue_of(cluster_url, namespace, QueueConfig(replicas=5)).__aenter__()


async def replicas(url: str, namespace: str) -> int:
    async with jetstream_of(url) as js:
        return (await js.stream_info(names.prefill_stream(namespace))).config.num_replicas or 0


async def test_a_queue_that_is_there_gets_the_replicas(cluster_url: str, namespace: str) -> None:
    async with queue_of(cluster_url, namespace, QueueConfig()) as single:
        await push(single, b"kept")
        async with queue_of(cluster_url, namespace) as replicated:
            assert await replicas(cluster_url, namespace) == 3
            kept = await pull(replicated, ELECTED_S)
            assert kept.payload == b"kept"
            await kept.ack()
            # Who asks for fewer takes what there is.
            async with queue_of(cluster_url, namespace, QueueConfig()) as third:
                await push_again(third, b"next")
                assert (await pull(replicated, ELECTED_S)).payload == b"next"
            assert await replicas(cluster_url, namespace) == 3


async def test_the_storage_of_a_queue_that_is_there_cannot_change(
    cluster_url: str, namespace: str
) -> None:
    async with queue_of(cluster_url, namespace):
        with pytest.raises(StartupError, match="storage is memory there and file here"):
            await queue_of(
                cluster_url, namespace, QueueConfig(replicas=3, storage="file")
            ).__aenter__()
