"""The observer on every store and messaging, over real status servers."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.overview.model import Overview
from dynamo_lite.overview.observer import Observer
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode, encode_json
from dynamo_lite.protocol.kv import KvNotice, Load
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.store import Lease, Store
from tests.builders import endpoint_record, eventually, register
from tests.hostile import answering
from tests.simulation.servers.memory import MemoryMessaging, MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

PATIENCE_S = 15.0


class Cluster:
    """Leases, records, notices; and what an observer makes of them."""

    def __init__(self, store: Store, messaging: Messaging, namespace: str, stack: AsyncExitStack):
        self.store, self.messaging, self.namespace = store, messaging, namespace
        self.stack = stack

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

    async def tell(self, lease_id: int, load: Load) -> None:
        notice = KvNotice(lease_id=lease_id, number=1, load=load)
        await self.messaging.publish(names.kv_subject(self.namespace, "VllmWorker"), encode(notice))

    def observer(self, drops: list[str] | None = None) -> Observer:
        on_drop = (drops if drops is not None else []).append
        return Observer(self.store, self.messaging, self.namespace, on_drop)


@pytest.fixture(params=["memory", "real"])
async def cluster(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            store: Store = await stack.enter_async_context(MemoryStore())
            messaging: Messaging = await stack.enter_async_context(MemoryMessaging())
        else:
            etcd, nats = (request.getfixturevalue(f"{name}_url") for name in ("etcd", "nats"))
            store = await stack.enter_async_context(EtcdStore(etcd))
            messaging = await stack.enter_async_context(NatsMessaging(nats))
        yield Cluster(store, messaging, namespace, stack)


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
        worker = seen.workers[0]
        assert (worker.component, worker.lease) == ("VllmWorker", f"{lease.id:x}")
        assert (worker.running, worker.waiting) == (1, 2)
        key = names.endpoint_key(cluster.namespace, "VllmWorker", "generate", lease.id)
        await cluster.store.delete(key)
        await seen_by(observer, lambda seen: not seen.workers)


async def test_counters_become_rates(cluster: Cluster):
    _, registry = await cluster.start("PrefillWorker", "prefill")
    written = Counter("dynamo_lite_kv_transfer_bytes", "", registry=registry)
    written.inc(1000)
    async with cluster.observer() as observer:
        assert (await observer.look()).rate_s == 0
        # A look that gets no page in time shows what was there before.
        await seen_by(observer, lambda seen: seen.transfers.total_bytes == 1000)
        written.inc(500)
        seen = await seen_by(observer, lambda seen: seen.transfers.total_bytes == 1500)
        assert seen.transfers.bytes_per_s > 0


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


async def test_what_a_worker_tells_routers_is_newer_than_what_it_answers(cluster: Cluster):
    lease, _ = await cluster.start("VllmWorker", "generate")
    drops: list[str] = []
    async with cluster.observer(drops) as observer:
        await seen_by(observer, lambda seen: seen.workers)
        await cluster.tell(0xBAD, Load(running=99))
        await cluster.tell(lease.id, Load(running=7, kv_usage=0.25))
        seen = await seen_by(observer, lambda seen: seen.workers[0].running == 7)
        assert (seen.workers[0].waiting, seen.workers[0].kv_usage) == (0, 0.25)
        await cluster.messaging.publish(
            names.kv_subject(cluster.namespace, "VllmWorker"), b"no notice"
        )
        await seen_by(observer, lambda _: drops == ["kv_notice"])


async def test_links_are_followed(cluster: Cluster):
    decode, _ = await cluster.start("VllmWorker", "generate")
    prefill, _ = await cluster.start("PrefillWorker", "prefill")
    key = names.link_key(cluster.namespace, prefill.id, "engine")
    record = LinkRecord(
        prefill_lease_id=prefill.id, engine_id="engine", decode_lease_id=decode.id, detail="reset"
    )
    drops: list[str] = []
    await cluster.store.put(key, encode_json(record))
    async with cluster.observer(drops) as observer:
        seen = await seen_by(observer, lambda seen: seen.failed_links)
        [link] = seen.failed_links
        assert (link.prefill, link.detail) == (f"{prefill.id:x}", "reset")
        await cluster.store.put(key, b"{}")
        await seen_by(observer, lambda seen: not seen.failed_links)
        assert drops == ["record"]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.0 200 OK\r\n\r\n[1]",
        b"HTTP/1.0 200 OK\r\n\r\n\xff{",
        b'HTTP/1.0 200 OK\r\n\r\n{"a": "\xff"}',
        b'HTTP/1.0 200 OK\r\n\r\n{"a": ' + 100_000 * b"[",
        b"HTTP/1.0 500 No\r\n\r\n{}",
        b"HTTP/1.0 302 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"nonsense",
    ],
)
async def test_who_answers_nonsense_is_silent(answer: bytes | None, namespace: str):
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MemoryStore())
        messaging = await stack.enter_async_context(MemoryMessaging())
        cluster = Cluster(store, messaging, namespace, stack)
        url = await stack.enter_async_context(answering(answer))
        await cluster.register("VllmWorker", "generate", url)
        await cluster.register("PrefillWorker", "prefill", "file:///etc/passwd")
        async with cluster.observer() as observer:
            seen = await seen_by(observer, lambda seen: len(seen.workers) == 2)
            assert {worker.state for worker in seen.workers} == {"silent"}
