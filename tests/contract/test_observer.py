"""The observer, over real status servers."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.overview.model import Overview
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.store import Lease, Store
from tests.builders import endpoint_record, eventually, register
from tests.hostile import answering
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PATIENCE_S = 15.0


class Cluster:
    """Leases and records; and what an observer makes of them."""

    def __init__(self, store: Store, namespace: str, stack: AsyncExitStack):
        self.store, self.namespace, self.stack = store, namespace, stack

    async def start(self, component: str, endpoint: str) -> tuple[Lease, CollectorRegistry]:
        """A process whose status server answers."""
        registry = CollectorRegistry()
        facts = {"ok": True, "state": "ready", "instance": 0, "running": 1, "waiting": 2}
        status = await self.stack.enter_async_context(StatusServer(lambda: facts, registry))
        return await self.register(component, endpoint, status.url), registry

    async def register(
        self, component: str, endpoint: str, status_url: str, stream: str | None = None
    ) -> Lease:
        lease = await self.stack.enter_async_context(self.store.lease(30.0))
        record = endpoint_record(
            lease.id,
            component,
            endpoint,
            namespace=self.namespace,
            stream=stream,
            status_url=status_url,
        )
        await register(self.store, record, lease=lease)
        return lease

    def observer(self) -> Observer:
        return Observer(self.store, self.namespace)


@pytest.fixture
async def cluster(namespace: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MemoryStore())
        yield Cluster(store, namespace, stack)


async def seen_by(observer: Observer, accept: Callable[[Overview], Any]) -> Overview:
    """Looks until it sees that."""

    async def accepted() -> Overview | None:
        seen = await observer.look()
        return seen if accept(seen) else None

    return await eventually(accepted, PATIENCE_S)


async def test_members_come_and_go(cluster: Cluster):
    async with cluster.observer() as observer:
        assert (await observer.look()).workers == []
        lease, _ = await cluster.start("VllmWorker", "generate")
        # Without its page in time a worker is silent.
        seen = await seen_by(observer, lambda seen: [w.state for w in seen.workers] == ["ready"])
        worker, mine = seen.workers[0], lease.id
        assert (worker.component, worker.lease) == ("VllmWorker", f"{lease.id:x}")
        assert (worker.running, worker.waiting) == (1, 2)
        link = LinkRecord(prefill_lease_id=mine, engine_id="e", decode_lease_id=mine, detail="x")
        await cluster.store.put(names.link_key(cluster.namespace, mine, "e"), encode_json(link))
        await cluster.store.put(f"{names.links_prefix(cluster.namespace)}x", b"[]")
        assert [one.detail for one in (await observer.look()).failed_links] == ["x"]
        key = names.endpoint_key(cluster.namespace, "VllmWorker", "generate", lease.id)
        await cluster.store.delete(key)
        await seen_by(observer, lambda seen: not seen.workers)


TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize("frontends", [1, 2])
async def test_latencies_of_a_frontend_that_has_them_on_its_http_port_only(
    cluster: Cluster, frontends: int
):
    """As vLLM's Rust frontend. A port that two share is not asked: it would be counted twice."""
    page = CollectorRegistry()
    latency = Histogram(TTFT, "", registry=page)
    http = await cluster.stack.enter_async_context(StatusServer(dict, page))
    for _ in range(frontends):
        status = StatusServer(lambda: {"ok": True, "state": "ready"}, CollectorRegistry())
        url = (await cluster.stack.enter_async_context(status)).url
        await cluster.register("Frontend", "http", url, stream=http.url.removeprefix("http://"))
    async with cluster.observer() as observer:
        await seen_by(observer, lambda seen: len(seen.workers) == frontends)
        latency.observe(0.1)
        if frontends == 1:
            await seen_by(observer, lambda seen: seen.ttft.count == 1)
        else:
            assert (await observer.look()).ttft.count == 0


async def test_without_etcd_the_known_members_are_shown_and_the_page_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    await cluster.start("VllmWorker", "generate")
    async with cluster.observer() as observer:
        assert (await observer.look()).trouble == []

        async def away(prefix: str) -> dict[str, bytes]:
            raise StoreUnavailable(prefix)

        monkeypatch.setattr(cluster.store, "get_prefix", away)
        seen = await observer.look()
        assert [worker.component for worker in seen.workers] == ["VllmWorker"]
        assert seen.trouble == ["etcd does not respond: members may have left"]


async def test_who_answers_nonsense_is_silent(cluster: Cluster):
    """Also to the question for its metrics."""
    async with answering(b"HTTP/1.0 200 OK\r\n\r\n\xff{") as url:
        await cluster.register("VllmWorker", "generate", url)
        async with cluster.observer() as observer:
            [worker] = (await seen_by(observer, lambda seen: seen.workers)).workers
            assert worker.state == "silent"
