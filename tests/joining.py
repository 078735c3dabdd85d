"""A Forwarder that discovers its engines, and processes that register scripted ones, each run by
the process host of this test's own process, on real servers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dynamo_lite.forward.forwarder import Forwarder
from dynamo_lite.forward.join import JoinedEngine, JoinOptions
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.forwarding import JOINED_AS
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.process.component import Component, ProcessSpec
from dynamo_lite.runtime.process.host import ProcessEnvironment, run_process
from dynamo_lite.runtime.store import Store
from tests.builders import eventually
from tests.forwarding import COMPLETION
from tests.scripted import HANDOVERS, Fleet, ScriptedEngine

PATIENCE_S = 20.0


@dataclass(eq=False)
class Running:
    """One process: its exit code, and what it reports."""

    store: Store
    component: Any
    task: asyncio.Task[int] = field(init=False)
    reports: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    ready: dict[str, Any] = field(default_factory=dict)

    async def until(self, state: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while (report := await self.reports.get())["state"] != state:
                assert report["state"] != "failed", report
        return report

    @property
    def lease(self) -> str:
        return self.ready["lease"]

    async def revoke(self) -> None:
        await self.store.revoke(int(self.lease, 16))

    async def end(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


@dataclass(eq=False)
class Cluster:
    namespace: str
    etcd_url: str
    nats_url: str
    store: Store
    session: aiohttp.ClientSession
    stack: AsyncExitStack
    fleet: Fleet = field(default_factory=Fleet)

    async def engine(self, role: Any, protocol: str = "nixl", **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine(self.fleet, role, HANDOVERS[protocol], **options)
        return await self.stack.enter_async_context(engine)

    async def join(self, engine: ScriptedEngine, **how: Any) -> Running:
        """As `start_join`; returns when it is registered."""
        running = self.start_join(engine, **how)
        running.ready = await running.until("ready")
        return running

    def start_join(
        self,
        engine: ScriptedEngine,
        *,
        grace_s: float = 10.0,
        etcd_url: str | None = None,
        ttl_s: float = 20.0,
        store: Store | None = None,
        **options: Any,
    ) -> Running:
        """store: in etcd's place."""
        given = {"url": engine.url, "role": engine.role, "protocol": "nixl"} | options
        joining = JoinOptions(**given, health_interval_s=0.05)
        spec = self._spec(
            JOINED_AS[joining.role],
            nats_url="",
            etcd_url=etcd_url or self.etcd_url,
            grace_s=grace_s,
            lease_ttl_s=ttl_s,
        )
        environment = ProcessEnvironment()
        if store is not None:
            environment = ProcessEnvironment(open_store=lambda _: nullcontext(store))
        return self._run(spec, JoinedEngine(joining), environment)

    async def forwarder(self, **config: Any) -> Running:
        """Its `ready` has the URL."""
        spec = self._spec("Forwarder", nats_url=self.nats_url, etcd_url=self.etcd_url)
        running = self._run(spec, Forwarder({"port": 0, "health_interval_s": 0.05, **config}, spec))
        running.ready = await running.until("ready")
        return running

    async def failing_forwarder(self, **config: Any) -> str:
        """Why it did not start."""
        spec = self._spec("Forwarder", nats_url=self.nats_url, etcd_url=self.etcd_url)
        running = self._run(spec, Forwarder({"port": 0, **config}, spec))
        async with asyncio.timeout(PATIENCE_S):
            while (report := await running.reports.get())["state"] != "failed":
                assert report["state"] != "ready"
        return str(report)

    def _spec(self, component: str, **more: Any) -> ProcessSpec:
        return ProcessSpec(
            namespace=self.namespace, component=component, instance=0, state_dir="/nowhere", **more
        )

    def _run(
        self, spec: ProcessSpec, component: Component, environment: ProcessEnvironment | None = None
    ) -> Running:
        running = Running(self.store, component)
        running.task = asyncio.create_task(
            run_process(spec, component, running.reports.put_nowait, environment),
            name=spec.component,
        )
        self.stack.push_async_callback(self._end, running)
        return running

    async def _end(self, running: Running) -> None:
        if not running.task.done():
            running.task.cancel()
            await asyncio.wait({running.task})

    async def records(self) -> dict[str, EndpointRecord]:
        """By component, without the Forwarder's."""
        found = await self.store.get_prefix(names.components_prefix(self.namespace))
        records = [decode_json(value, EndpointRecord) for value in found.values()]
        return {r.component: r for r in records if r.component != "Forwarder"}

    async def gone(self, component: str) -> None:
        """Returns when the component has no record."""

        async def looks_gone() -> bool:
            return component not in await self.records()

        await eventually(looks_gone, PATIENCE_S)

    async def ask(self, forwarder: Running, **fields: Any) -> tuple[int, Any]:
        url = f"{forwarder.ready['url']}/v1/completions"
        async with self.session.post(url, json={**COMPLETION, **fields}) as answer:
            return answer.status, await answer.json(content_type=None)

    async def health(self, running: Running) -> dict[str, Any]:
        async with self.session.get(f"{running.ready['status_url']}/health") as answer:
            return await answer.json()

    async def metrics(self, running: Running) -> str:
        async with self.session.get(f"{running.ready['status_url']}/metrics") as answer:
            return await answer.text()

    async def healthy(
        self, running: Running, accept: Callable[[dict[str, Any]], Any]
    ) -> dict[str, Any]:
        """Its health, once it is as wanted."""

        async def accepted() -> dict[str, Any] | None:
            found = await self.health(running)
            return found if accept(found) else None

        return await eventually(accepted, PATIENCE_S)

    async def counts(self, running: Running, prefill: int, decode: int) -> dict[str, Any]:
        """Waits until this many engines are usable."""
        return await self.healthy(
            running,
            lambda h: (h.get("prefill_engines"), h.get("decode_engines")) == (prefill, decode),
        )


@asynccontextmanager
async def cluster(namespace: str, etcd_url: str, nats_url: str) -> AsyncIterator[Cluster]:
    """Fails if an engine has seen its protocol broken."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(EtcdStore(etcd_url))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Cluster(namespace, etcd_url, nats_url, store, session, stack)
        yield made
        assert made.fleet.violations == []
