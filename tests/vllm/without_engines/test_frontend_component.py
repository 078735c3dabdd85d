"""The Frontend as a component: roster, real token streams and null engines, one process."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry

from dynamo_lite.cli import live_options
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.stop import StopRequest
from dynamo_lite.serve.services.frontend.frontend import Frontend
from tests.null_engine import NullEngine
from tests.twins.servers import MemoryMessaging, MemoryStore
from tests.vllm.front_half import flags

TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}


class Cluster:
    """Processes that share this event loop, a store and a broker."""

    def __init__(self, namespace: str):
        self.spec = ProcessSpec(
            namespace=namespace,
            component="Frontend",
            instance=0,
            nats_url="",
            etcd_url="",
            state_dir="",
            watch_component="VllmWorker",
            config={"port": 0},
        )
        self.store = MemoryStore()
        self.messaging = MemoryMessaging()
        self.registry = CollectorRegistry()  # the Frontend's
        self.extra: list[str] = []  # its arguments of vLLM's
        self.facts: dict[str, Any] = {}  # what it said when it was ready
        self.options: Callable[[], Any] = lambda: None

    @asynccontextmanager
    async def host(self, spec: ProcessSpec) -> AsyncIterator[Host]:
        async with self.store.lease(10.0) as lease:
            host = Host(
                spec=spec,
                store=self.store,
                messaging=self.messaging,
                lease=lease,
                registry=self.registry if spec.component == "Frontend" else CollectorRegistry(),
                report=lambda line: None,
                stopping=StopRequest(),
            )
            try:
                yield host
            finally:
                await host.deregister()
                await host.tasks.end()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[GenerateServer]:
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(
                self.host(replace(self.spec, component="VllmWorker"))
            )
            engine = await stack.enter_async_context(NullEngine(token_id=70))
            server = await stack.enter_async_context(GenerateServer(engine))

            async def deliver() -> None:
                async for deltas in engine.steps():
                    server.deliver(deltas)

            host.spawn(deliver(), "steps")
            await host.register("generate", stream=server.stream_address)
            yield server

    @asynccontextmanager
    async def frontend(self, model: Path) -> AsyncIterator[tuple[Frontend, str]]:
        spec = replace(self.spec, engine_args=[*flags(model), *self.extra])
        async with self.host(spec) as host:
            component, self.options = Frontend(spec.config), lambda: host.options
            try:
                self.facts = await component.start(host)
                yield component, self.facts["url"]
            finally:
                await host.stack.aclose()

    async def records(self) -> dict[str, EndpointRecord]:
        entries = await self.store.get_prefix(names.components_prefix(self.spec.namespace))
        return {key: decode_json(value, EndpointRecord) for key, value in entries.items()}


@pytest.fixture
def cluster(namespace: str) -> Cluster:
    return Cluster(namespace)


async def answered(
    http: httpx.AsyncClient, status: int, body: dict[str, object] = TEXT
) -> httpx.Response:
    """The first answer with this status; the roster needs a moment."""
    async with asyncio.timeout(10):
        while True:
            answer = await http.post("/v1/completions", json=body)
            if answer.status_code == status:
                return answer
            await asyncio.sleep(0.01)


async def test_a_limit_that_is_set_while_it_runs(cluster: Cluster, model: Path):
    siblings = TEXT | {"n": 3, "temperature": 1}
    async with (
        cluster.worker(),
        cluster.frontend(model) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        await answered(http, 200, siblings)
        where = cluster.store, cluster.spec.namespace, cluster.spec.component
        await live_options.write(*where, {"max-in-flight-requests": 2})
        await answered(http, 429, siblings)
        options = cluster.options().facts()
        assert options["set"] == {"max-in-flight-requests": 2}
        assert options["file"]["max-in-flight-requests"] == 2048
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
        await live_options.write(
            *where, live_options.parse_unsets([cluster.spec.component])["Frontend"]
        )
        await answered(http, 200, siblings)


async def test_https_with_a_key_and_the_options_of_the_door(
    cluster: Cluster, model: Path, tmp_path: Path
):
    issued = trustme.CA()
    server = issued.issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    trust = ssl.create_default_context()
    issued.configure_trust(trust)
    config = {"max_body_bytes": 5000, "client_priority": "any"}
    cluster.spec = replace(cluster.spec, config={**cluster.spec.config, **config})
    cluster.extra = [
        *(f"--ssl-certfile={tmp_path}/cert.pem", f"--ssl-keyfile={tmp_path}/key.pem"),
        "--api-key=secret",
    ]
    key = {"authorization": "Bearer secret"}
    async with (
        cluster.worker() as worker,
        cluster.frontend(model) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20, verify=trust) as http,
    ):
        assert url.startswith("https://127.0.0.1:") and cluster.facts["asks_key"] is True
        assert (await http.post("/tokenize", json=TEXT)).status_code == 401
        for path in ("/health", "/metrics", "/dashboard"):
            assert (await http.get(path)).status_code == 200, path
        http.headers.update(key)
        assert (await answered(http, 200)).json()["usage"]["completion_tokens"] == 4
        large = await http.post("/v1/completions", json=TEXT | {"user": "a" * 6000})
        assert large.status_code == 413 and "5000 bytes" in large.text
        assert worker.in_flight == 0
        assert (await http.get("/dashboard/overview")).json()["namespace"]


async def test_a_taken_port_is_reported_before_anything_is_loaded(cluster: Cluster, tmp_path: Path):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        cluster.spec = replace(cluster.spec, config={"port": taken.getsockname()[1]})
        with pytest.raises(StartupError, match=r"cannot listen on 127\.0\.0\.1"):
            async with cluster.frontend(tmp_path / "no-model"):
                pass


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, True), ({"host": "0.0.0.0"}, False), ({"host": "0.0.0.0", "dashboard": True}, True)],
)
async def test_the_dashboard_is_for_this_machine_unless_it_is_turned_on(
    cluster: Cluster, model: Path, options: dict[str, object], shown: bool
):
    cluster.spec = replace(cluster.spec, config={**cluster.spec.config, **options})
    async with (
        cluster.frontend(model) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        status = (await http.get("/dashboard")).status_code
        assert status == (200 if shown else 404)


async def test_a_drain_does_not_wait_for_who_watches(cluster: Cluster, model: Path):
    async with (
        cluster.frontend(model) as (component, url),
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        assert (await http.get("/dashboard/overview")).json()["namespace"]
        async with asyncio.timeout(20):
            await component.drain(grace_s=100.0)
