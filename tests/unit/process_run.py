"""A process under test on the in-process twins: its component, its reports, its exit code."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.host import ProcessEnvironment, run_process
from dynamo_lite.runtime.store import Lease
from tests.twins.servers import MemoryMessaging, MemoryStore


class Worker:
    """A component that notes its calls; hooks make it misbehave."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.host: Host | None = None
        self.on_start: Callable[[Host], Any] | None = None
        self.on_drain: Callable[[], Any] | None = None
        self.on_close: Callable[[], Any] | None = None
        self.healthy = True

    async def start(self, host: Host) -> dict[str, Any]:
        self.calls.append("start")
        self.host = host
        host.stack.push_async_callback(self._close)
        if self.on_start:
            await self.on_start(host)
        await host.register("generate", stream="127.0.0.1:9", model="m")
        return {"url": "http://here"}

    async def drain(self, grace_s: float) -> None:
        self.calls.append(f"drain {grace_s:g}")
        if self.on_drain:
            await self.on_drain()

    async def _close(self) -> None:
        self.calls.append("close")
        if self.on_close:
            await self.on_close()

    def health(self) -> dict[str, Any]:
        return {"ok": self.healthy, "jobs": 3}


class RefusingStore(MemoryStore):
    """puts, deletes: how many still fail. slow: puts of this value wait for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = self.deletes = 0
        self.deleted: list[str] = []
        self.slow: bytes | None = None
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> None:
        if value == self.slow:
            self.asked.set()
            await self.go.wait()
        if self.puts:
            self.puts -= 1
            raise StoreUnavailable("not now")
        await super().put(key, value, lease=lease)

    async def delete(self, key: str) -> bool:
        self.deleted.append(key)
        if self.deletes:
            self.deletes -= 1
            raise StoreUnavailable("its server was just killed")
        return await super().delete(key)


class Run:
    def __init__(self, store: MemoryStore | None = None, **spec: Any):
        self.store = store or MemoryStore()
        self.messaging = MemoryMessaging()
        self.worker = Worker()
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        options = {"nats_url": "nats://x", "etcd_url": "http://x", "lease_ttl_s": 5.0}
        options |= {"state_dir": "/nowhere", **spec}
        self.spec = ProcessSpec(namespace="n", component="Worker", instance=0, **options)
        self.environment = ProcessEnvironment(
            open_store=lambda _: contextlib.nullcontext(self.store),
            open_messaging=lambda *_: contextlib.nullcontext(self.messaging),
        )

    @property
    def host(self) -> Host:
        assert self.worker.host is not None
        return self.worker.host

    def start(self) -> asyncio.Task[int]:
        return asyncio.create_task(
            run_process(self.spec, self.worker, self.reports.put_nowait, self.environment)
        )

    async def until(self, state: str) -> dict[str, Any]:
        async with asyncio.timeout(15):
            while (report := await self.reports.get())["state"] != state:
                pass
        return report

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the report. At the end it must leave in order."""
        exit_code = self.start()
        yield await self.until("ready")
        self.host.stop("enough")
        assert await exit_code == 0


async def get(url: str) -> tuple[int, bytes]:
    def fetch() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(fetch)
