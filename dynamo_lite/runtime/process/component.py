"""The specification of a process (`ProcessSpec`), the work in it (`Component`), and what the
work gets from its process (`Host`)."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from dynamo_lite import __version__
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode_json
from dynamo_lite.protocol.errors import LeaseLost, StoreUnavailable
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport, StockEngine
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, StopRequest, loss_exit_code
from dynamo_lite.runtime.retry import START_WAIT_S, retry_while_unavailable
from dynamo_lite.runtime.secret import GraphSecret
from dynamo_lite.runtime.store import Delete, Lease, Snapshot, Store, WatchEvent
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.runtime.tracing.tracer import Tracer, TracingOptions

logger = logging.getLogger(__name__)

_RESTORE_PAUSE_S = 0.2

#: Sends one message to the supervisor.
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """The whole input of a child process; plain data."""

    namespace: str
    #: The service's name, such as "VllmWorker".
    component: str
    #: 0 to instances - 1.
    instance: int
    #: Empty: this process uses no broker.
    nats_url: str
    etcd_url: str
    state_dir: str
    #: See `runtime/secret.py`; None: messages are not authenticated.
    secret_file: str | None = None
    #: Processes of this service that the same supervisor runs.
    instances: int = 1
    #: Devices that it occupies.
    devices: int = 1
    #: Where the status server and the token stream listen.
    bind_host: str = "127.0.0.1"
    #: Of the status server; 0: a free one.
    status_port: int = 0
    #: Certificate and key for HTTPS; None: HTTP.
    status_tls: tuple[str, str] | None = None
    lease_ttl_s: float = 30.0
    #: Longest drain.
    grace_s: float = 30.0
    #: This service's own options.
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    #: Flags for vLLM.
    engine_args: list[str] = field(default_factory=list[str])
    #: Options of the services that run inside this process, by name.
    inner: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    #: The component whose `generate` endpoint a Frontend calls.
    watch_component: str = ""
    #: None when tracing is off.
    tracing: TracingOptions | None = None


class Component(Protocol):
    """The work of one process. All calls come from one task, in this order."""

    async def start(self, host: "Host") -> Mapping[str, Any]:
        """Starts everything and registers it. Returns facts for the supervisor.

        It is cancelled when the process is asked to stop meanwhile.
        """
        ...

    async def drain(self, grace_s: float) -> None:
        """Accepts no more work, waits up to `grace_s` for running work, then cancels the rest.

        Called after a successful start, when the endpoints are already deregistered.
        """
        ...

    async def close(self) -> None:
        """Frees all resources; always called, also after a failed start."""
        ...

    def health(self) -> Mapping[str, Any]:
        """Facts for /health; `ok` is whether the component is healthy.

        Three facts are for `/live` and `/ready` (`readiness.py`): `dead` is why the process must
        be restarted, `checks` are this component's conditions for accepting work, and
        `without_broker` says how it accepts work without NATS; absent or empty if it does not.
        """
        ...


class Host:
    """What a process offers to its component: servers, registration, owned tasks."""

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
        secret: GraphSecret | None = None,
    ):
        self.spec = spec
        self.store = store
        self.messaging = messaging
        self.lease = lease
        self.registry = registry
        self.clock = clock
        self.drops = drops
        self.tracer = tracer
        self.secret = secret
        self.status_url = ""
        self.probes: Probes | None = None
        self._report = report
        self._stop = stop
        self._held: dict[str, bytes] = {}
        #: Released keys that the store may still have.
        self._undeleted: set[str] = set()
        self._deleter: asyncio.Task[None] | None = None
        #: Held while one of them is deleted.
        self._deleting = asyncio.Lock()
        self._endpoints: list[str] = []
        self._guard: asyncio.Task[None] | None = None
        self._tasks = OwnedTasks(self._task_failed)

    def __repr__(self) -> str:
        name = f"{self.spec.namespace}/{self.spec.component}[{self.spec.instance}]"
        return f"Host({name}, endpoints={len(self._endpoints)}, tasks={len(self._tasks)})"

    async def register(
        self,
        endpoint: str,
        *,
        component: str = "",
        stream: str | None = None,
        certificate: str | None = None,
        model: str = "",
        engine: StockEngine | None = None,
    ) -> EndpointRecord:
        """Registers an endpoint under the lease; call it when the endpoint is already served.

        component: name of a service inside this process; empty for the process's own.
        stream: HOST:PORT of the token stream. certificate: its fingerprint, if it uses TLS.
        engine: the stock engine that this process stands for. Raises LeaseLost or
        StoreUnavailable.
        """
        component = component or self.spec.component
        name = (self.spec.namespace, component, endpoint, self.lease.id)
        record = EndpointRecord(
            component=component,
            endpoint=endpoint,
            namespace=self.spec.namespace,
            lease_id=self.lease.id,
            transport=EndpointTransport(
                nats_tcp=names.endpoint_subject(*name), stream=stream, certificate=certificate
            ),
            pid=os.getpid(),
            instance=self.spec.instance,
            host=socket.gethostname(),
            status_url=self.status_url,
            started_at=self.clock.wall(),
            model=model,
            authenticated=self.secret is not None,
            version=__version__,
            wire_version=WIRE_VERSION,
            engine=engine,
        )
        key, value = names.endpoint_key(*name), encode_json(record)
        await self.hold(key, value)
        self._endpoints.append(key)
        return record

    async def deregister(self) -> bool:
        """Deletes the registrations of all endpoints. Returns what `release` does."""
        endpoints = tuple(self._endpoints)
        gone = await self.release(*endpoints)
        if gone:
            self._endpoints = [key for key in self._endpoints if key not in endpoints]
        return gone

    async def hold(self, key: str, value: bytes, *, within_s: float = START_WAIT_S) -> None:
        """Puts `key` under the lease, and again whenever the store loses it while the lease is
        alive. Raises LeaseLost, or StoreUnavailable after `within_s`."""
        if key in self._undeleted:
            async with self._deleting:
                self._undeleted.discard(key)
        await retry_while_unavailable(
            lambda: self.store.put(key, value, lease=self.lease), within_s=within_s
        )
        self._held[key] = value
        if self._guard is None or self._guard.done():
            self._guard = self.spawn(self._watch_own(key), f"guard {key}")

    async def release(self, *keys: str) -> bool:
        """Deletes held keys. Returns whether they are gone: if the store is unavailable, they are
        deleted when it is back, or expire with the lease."""
        for key in keys:
            self._held.pop(key, None)
        if self.lease.loss is not None:
            return True
        gone = True
        for key in keys:
            gone = await self._delete(key) and gone
        if not gone and (self._deleter is None or self._deleter.done()):
            self._deleter = self.spawn(self._delete_again(), "delete keys")
        return gone

    async def _delete(self, key: str) -> bool:
        try:
            await self.store.delete(key)
        except StoreUnavailable as exc:
            logger.warning("%s was not deleted, retrying until the lease ends: %s", key, exc)
            self._undeleted.add(key)
            return False
        self._undeleted.discard(key)
        return True

    async def _delete_again(self) -> None:
        while self._undeleted and self.lease.loss is None:
            await asyncio.sleep(_RESTORE_PAUSE_S)
            for key in tuple(self._undeleted):
                async with self._deleting:
                    if key in self._undeleted and await self._is_deleted(key):
                        self._undeleted.discard(key)

    async def _is_deleted(self, key: str) -> bool:
        try:
            await self.store.delete(key)
        except StoreUnavailable as exc:
            logger.debug("%s was not deleted yet, retrying: %s", key, exc)
            return False
        return True

    def progress(self, text: str) -> None:
        """Reports to the supervisor what the start is doing."""
        self._report({"state": "starting", "detail": text})

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs a task of the process. If it fails, the process drains and exits with code 70.

        It is ended after the component is closed.
        """
        return self._tasks.start(coro, name=name)

    def stop(self, reason: str, code: int = 0) -> None:
        """Requests a drain and then an exit with `code`. Only the first call counts."""
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
        """Watches one held key: its deletion is the first sign of a revoked lease.

        When that key is released, another held key is watched.
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
        """Puts lost keys back while the lease is alive. Returns False when the lease is lost."""
        while await self.lease.verify() is None:
            try:
                await self._put_back()
                logger.warning("the store had lost keys of a live lease; they were put back")
                return True
            except LeaseLost as exc:
                # A revocation deletes the keys before the lease, and the first check was in
                # between. Without this check only the next refresh would detect it.
                logger.debug("%s", exc)
                if await self.lease.verify() is not None:
                    break
            except StoreUnavailable as exc:
                logger.debug("keys were not put back yet, retrying: %s", exc)
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
