"""The specification of a process (`ProcessSpec`), the work in it (`Component`), and what the
work gets from its process (`Host`)."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from dynamo_lite import __version__
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode_json
from dynamo_lite.protocol.live_options import Values
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport, StockEngine
from dynamo_lite.runtime.address import is_loopback
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.live_options import LiveOptions
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.held_keys import HeldKeys
from dynamo_lite.runtime.process.readiness import ProbeBody, Probes
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED, StopRequest, loss_exit_code
from dynamo_lite.runtime.store import Lease, Store
from dynamo_lite.runtime.tasks import OwnedTasks
from dynamo_lite.runtime.tracing import Tracer, TracingOptions

logger = logging.getLogger(__name__)

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
    #: Processes of this service that the same supervisor runs.
    instances: int = 1
    #: Where the status server and the token stream listen.
    bind_host: str = "127.0.0.1"
    #: Of the status server; 0: a free one.
    status_port: int = 0
    #: The folder with this component's certificate; None: without TLS.
    certificates: str | None = None
    lease_ttl_s: float = 30.0
    #: Longest drain.
    grace_s: float = 30.0
    #: This service's own options.
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    #: Flags for vLLM.
    engine_args: list[str] = field(default_factory=list[str])
    #: The component whose `generate` endpoint a Frontend calls.
    watch_component: str = ""
    #: None when tracing is off.
    tracing: TracingOptions | None = None


class Component(Protocol):
    """The work of one process. All calls come from one task, in this order.

    What `start` opens goes into the host's `stack`, which is closed at the end, also after a failed
    start.
    """

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

    def health(self) -> Mapping[str, Any]:
        """Facts for /health after a successful start; `ok` is whether the component is healthy.

        Three facts are for `/live` and `/ready` (`readiness.py`): `dead` is why the process must
        be restarted, `checks` are this component's conditions for accepting work, and
        `without_broker` says how it accepts work without NATS; absent or empty if it does not.
        """
        ...


@dataclass(kw_only=True, eq=False, repr=False)
class Host:
    """What a process offers to its component: servers, registration, owned tasks."""

    spec: ProcessSpec
    store: Store
    messaging: Messaging
    lease: Lease
    registry: CollectorRegistry
    report: Report
    stopping: StopRequest
    clock: Clock = SYSTEM_CLOCK
    drops: OnDrop = uncounted
    tracer: Tracer | None = None
    #: Of this component; None: it has none.
    certificates: Certificates | None = None
    status_url: str = ""
    #: None where it has none.
    options: LiveOptions | None = None
    probes: Probes = field(default_factory=dict[str, Callable[[], ProbeBody]])
    #: What the component has opened.
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self._endpoints: set[str] = set()
        self.tasks = OwnedTasks(self._task_failed)
        #: What the process stores under its lease.
        self.keys = HeldKeys(self.store, self.lease, self.spawn)

    @property
    def own_certificates(self) -> Certificates | None:
        """Of its servers; None where only processes of this machine reach them."""
        return None if is_loopback(self.spec.bind_host) else self.certificates

    async def register(
        self,
        endpoint: str,
        *,
        component: str = "",
        stream: str | None = None,
        tls: bool = False,
        model: str = "",
        engine: StockEngine | None = None,
    ) -> EndpointRecord:
        """Registers an endpoint under the lease; call it when the endpoint is already served.

        component: name of a service inside this process; empty for the process's own.
        stream: HOST:PORT of the token stream. tls: whether it uses TLS. engine: the stock engine
        that this process stands for. Raises LeaseLost or StoreUnavailable.
        """
        component = component or self.spec.component
        name = (self.spec.namespace, component, endpoint, self.lease.id)
        record = EndpointRecord(
            component=component,
            endpoint=endpoint,
            namespace=self.spec.namespace,
            lease_id=self.lease.id,
            transport=EndpointTransport(
                nats_tcp=names.endpoint_subject(*name), stream=stream, tls=tls
            ),
            pid=os.getpid(),
            instance=self.spec.instance,
            host=socket.gethostname(),
            status_url=self.status_url,
            started_at=self.clock.wall(),
            model=model,
            version=__version__,
            wire_version=WIRE_VERSION,
            engine=engine,
        )
        key, value = names.endpoint_key(*name), encode_json(record)
        try:
            await self.keys.hold(key, value)
        finally:
            # A call that failed may have been applied.
            self._endpoints.add(key)
        return record

    async def deregister(self) -> None:
        """Deletes the registrations of all endpoints; see `HeldKeys.release`."""
        endpoints, self._endpoints = self._endpoints, set()
        if endpoints:
            await self.keys.release(*endpoints)

    def live_options(
        self, config: object, on_change: Callable[[Values], None]
    ) -> AbstractAsyncContextManager[None]:
        """Follows those of this component, which /health shows. config: its options of the file.
        on_change: takes new values. Entering raises StoreUnavailable."""
        self.options = LiveOptions(
            self.store,
            self.spec.namespace,
            self.spec.component,
            config=config,
            on_change=on_change,
            on_drop=self.drops,
        )
        return self.options.following()

    def progress(self, text: str) -> None:
        """Has the supervisor print a line: what the start is doing, or what is wrong."""
        self.report({"state": "starting", "detail": text})

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs a task of the process. If it fails, the process drains and exits with code 70.

        It is ended after the component is closed.
        """
        return self.tasks.start(coro, name=name)

    def stop(self, reason: str, code: int = 0) -> None:
        """Requests a drain and then an exit with `code`. Only the first call counts."""
        self.stopping.set(reason, code)

    def _task_failed(self, task: asyncio.Task[Any], exc: BaseException) -> None:
        loss = self.lease.loss
        if loss is not None:
            self.stop(f"lease {loss.value}", loss_exit_code(loss))
            return
        logger.error("%s failed", task.get_name(), exc_info=exc)
        self.stop(f"{task.get_name()} failed: {exc}", EXIT_OWNED_TASK_FAILED)
