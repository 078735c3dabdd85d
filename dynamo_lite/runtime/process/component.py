"""What one process is told (`ProcessSpec`), what runs in it (`Component`), and what that
gets to work with (`Host`)."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, StopRequest, loss_exit_code
from dynamo_lite.runtime.retry import START_WAIT_S, retry_while_unavailable
from dynamo_lite.runtime.store import Delete, Lease, Snapshot, Store, WatchEvent
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.runtime.tracing.tracer import Tracer, TracingOptions

logger = logging.getLogger(__name__)

_RESTORE_PAUSE_S = 0.2

#: Takes one line for the supervisor.
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """All that a child process needs to know; plain data.

    component: the service's name, "VllmWorker"; instance: 0 .. workers-1.
    bind_host: where the status server and the token stream listen.
    grace_s: longest drain.
    config: this service's own options; engine_args: flags for vLLM.
    inner: options of the services that run inside this process, by name.
    watch_component: whose `generate` endpoint a frontend calls. tracing: None where nothing
    is traced.
    """

    namespace: str
    component: str
    instance: int
    nats_url: str
    etcd_url: str
    state_dir: str
    bind_host: str = "127.0.0.1"
    lease_ttl_s: float = 30.0
    grace_s: float = 30.0
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    engine_args: list[str] = field(default_factory=list[str])
    inner: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    watch_component: str = ""
    tracing: TracingOptions | None = None


class Component(Protocol):
    """The work of one process. All calls come from one task, in this order."""

    async def start(self, host: "Host") -> Mapping[str, Any]:
        """Brings everything up and registers it. Returns facts for the supervisor.

        Cancelled when the process is asked to stop meanwhile.
        """
        ...

    async def drain(self, grace_s: float) -> None:
        """Stops taking work, waits up to `grace_s` for what runs, then cancels the rest.

        Called after a successful start; the endpoints are deregistered already.
        """
        ...

    async def close(self) -> None:
        """Frees everything; called on every path, also after a failed start."""
        ...

    def health(self) -> Mapping[str, Any]:
        """Facts for /health; `ok` says whether the component can work.

        Two of them are for `/live` and `/ready` (`readiness.py`): `dead`, why the process
        must be started again, and `checks`, what work needs of this component.
        """
        ...


class Host:
    """The process as its component sees it."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        store: Store,
        messaging: Messaging,
        lease: Lease,
        registry: CollectorRegistry,
        report: Report,
        stop: StopRequest,
        clock: Clock = SYSTEM_CLOCK,
        drops: OnDrop = uncounted,
        tracer: Tracer | None = None,
    ):
        self.spec = spec
        self.store = store
        self.messaging = messaging
        self.lease = lease
        self.registry = registry
        self.clock = clock
        self.drops = drops
        self.tracer = tracer
        self.status_url = ""
        self.probes: Probes | None = None
        self._report = report
        self._stop = stop
        self._held: dict[str, bytes] = {}
        self._endpoints: list[str] = []
        self._guard: asyncio.Task[None] | None = None
        self._tasks = OwnedTasks(self._task_failed)

    def __repr__(self) -> str:
        name = f"{self.spec.namespace}/{self.spec.component}[{self.spec.instance}]"
        return f"Host({name}, endpoints={len(self._endpoints)}, tasks={len(self._tasks)})"

    async def register(
        self, endpoint: str, *, component: str = "", stream: str | None = None, model: str = ""
    ) -> EndpointRecord:
        """Announces an endpoint under the lease; call it when the endpoint is being served.

        component: of a service that runs inside this process; this process's own
        when empty. stream: HOST:PORT of the token stream. Raises LeaseLost or
        StoreUnavailable.
        """
        component = component or self.spec.component
        name = (self.spec.namespace, component, endpoint, self.lease.id)
        record = EndpointRecord(
            component=component,
            endpoint=endpoint,
            namespace=self.spec.namespace,
            lease_id=self.lease.id,
            transport=EndpointTransport(nats_tcp=names.endpoint_subject(*name), stream=stream),
            pid=os.getpid(),
            host=socket.gethostname(),
            status_url=self.status_url,
            started_at=self.clock.wall(),
            model=model,
        )
        key, value = names.endpoint_key(*name), encode_json(record)
        await self.hold(key, value)
        self._endpoints.append(key)
        return record

    async def deregister(self) -> None:
        """Releases the endpoints."""
        endpoints, self._endpoints = self._endpoints, []
        await self.release(*endpoints)

    async def hold(self, key: str, value: bytes, *, within_s: float = START_WAIT_S) -> None:
        """Puts `key` under the lease, and puts it back when it vanishes under a live one:
        the store may lose its data. Raises LeaseLost, or StoreUnavailable after `within_s`."""
        await retry_while_unavailable(
            lambda: self.store.put(key, value, lease=self.lease), within_s=within_s
        )
        self._held[key] = value
        if self._guard is None or self._guard.done():
            self._guard = self.spawn(self._watch_own(key), f"guard {key}")

    async def release(self, *keys: str) -> None:
        """Deletes held keys; without a store they go with the lease."""
        for key in keys:
            self._held.pop(key, None)
        if self.lease.loss is not None:
            return
        for key in keys:
            try:
                await self.store.delete(key)
            except StoreUnavailable as exc:
                logger.warning("%s is left to its lease: %s", key, exc)
                return

    def progress(self, text: str) -> None:
        """Tells the supervisor what the start is at."""
        self._report({"state": "starting", "detail": text})

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs an owned task; if it fails the process drains and exits 70.

        It is cancelled after the component is closed.
        """
        return self._tasks.start(coro, name=name)

    def stop(self, reason: str, code: int = 0) -> None:
        """Asks for a drain, then an exit with `code`. The first call counts."""
        self._stop.set(reason, code)

    async def cancel_tasks(self) -> None:
        """Ends the owned tasks."""
        await self._tasks.end()

    def _task_failed(self, task: asyncio.Task[Any], exc: BaseException) -> None:
        loss = self.lease.loss
        if loss is not None:
            self.stop(f"lease {loss.value}", loss_exit_code(loss))
            return
        logger.error("%s failed", task.get_name(), exc_info=exc)
        self.stop(f"{task.get_name()} failed: {exc}", EXIT_OWNED_TASK_FAILED)

    async def _watch_own(self, key: str) -> None:
        """Watches an own key: its deletion is the first sign of a revoked lease.

        When that key is released, another one is watched, as long as there are any.
        """
        watched: str | None = key
        while watched is not None:
            if not await self._watch_one(watched):
                return
            watched = next(iter(self._held), None)

    async def _watch_one(self, key: str) -> bool:
        """Returns True when the key was released, False when the lease is gone."""
        async with self.store.watch(key) as events:
            async for event in events:
                if key not in self._held:
                    return True
                if _shows_absent(event, key) and not await self._restore():
                    return False
        return False

    async def _restore(self) -> bool:
        """Puts vanished keys back while the lease is held. Whether to go on guarding."""
        while await self.lease.verify() is None:
            try:
                await self._put_back()
                logger.warning("own keys had vanished under a live lease, and were put back")
                return True
            except LeaseLost as exc:
                # A revocation deletes the keys before the lease, and the first look fell
                # in between: look again, or it is noticed only by the next keepalive.
                logger.debug("%s", exc)
                if await self.lease.verify() is not None:
                    break
            except StoreUnavailable as exc:
                logger.debug("own keys are still to be put back: %s", exc)
            await asyncio.sleep(_RESTORE_PAUSE_S)
        return False

    async def _put_back(self) -> None:
        for key, value in list(self._held.items()):
            if key in self._held:
                await self.store.put(key, value, lease=self.lease)
                if key not in self._held:  # released meanwhile
                    await self.store.delete(key)


def _shows_absent(event: WatchEvent, key: str) -> bool:
    match event:
        case Snapshot(entries):
            return key not in entries
        case Delete(deleted):
            return deleted == key
        case _:
            return False
