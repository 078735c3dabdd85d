"""The life cycle of one process: connect, start, ready, drain, close, exit code."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    nullcontext,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
)

from dynamo_lite import __version__
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, drop_counter
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.process.component import Component, Host, ProcessSpec, Report
from dynamo_lite.runtime.process.logs import hold_lease
from dynamo_lite.runtime.process.readiness import ProbeBody, liveness, readiness
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.process.stop import (
    EXIT_LEASE_EXPIRED,
    EXIT_START_FAILED,
    EXIT_STOPPED,
    Interrupted,
    StopRequest,
    loss_exit_code,
    stop_on_signals,
)
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.store import Lease, Store
from dynamo_lite.runtime.tasks import running
from dynamo_lite.runtime.tracing import open_tracer

logger = logging.getLogger(__name__)

#: Time after the grace period for the component to cancel running work and free resources.
_DRAIN_MARGIN_S = 5.0
_CLOSE_TIMEOUT_S = 30.0

Health = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """The environment of a process: the servers, its status server, the clock."""

    open_store: Callable[[ProcessSpec], AbstractAsyncContextManager[Store]] = lambda spec: (
        EtcdStore(spec.etcd_url)
    )
    open_messaging: Callable[[ProcessSpec, OnDrop], AbstractAsyncContextManager[Messaging]] = (
        lambda spec, on_drop: NatsMessaging(spec.nats_url, on_drop=on_drop)
    )
    #: Of a context with the `url` of the process's health and metrics.
    open_status: Callable[["Host", Health], AbstractAsyncContextManager[Any]] = (
        lambda host, health: StatusServer(
            health,
            host.registry,
            host.spec.bind_host,
            host.spec.status_port,
            on_drop=host.drops,
            probes=host.probes,
            vllm_registry=REGISTRY,
            certificates=host.own_certificates,
        )
    )
    clock: Clock = SYSTEM_CLOCK
    #: Raises when the process must not work with these servers. Asked once it is connected.
    check: Callable[[ProcessSpec, Store, Messaging], Awaitable[None]] | None = None


async def run_process(
    spec: ProcessSpec,
    component: Component,
    report: Report,
    environment: ProcessEnvironment | None = None,
) -> int:
    """Runs `component` until it is asked to stop. Returns the exit code (see `stop.py`).

    `report` gets `{"state": "starting" | "ready" | "draining" | "drained" | "failed", ...}`.
    """
    stop = StopRequest()
    with stop_on_signals(stop):
        async with AsyncExitStack() as stack:
            process = _Process(spec, component, report, stop, environment or ProcessEnvironment())
            try:
                async with stop.interrupts():
                    await process.start(stack)
            except Interrupted:
                process.interrupted()
            except Exception as exc:
                return process.failed(exc)
            else:
                await stop.wait()
                await process.drain()
            return stop.code


@dataclass(eq=False)
class _Process:
    """One run of one component."""

    spec: ProcessSpec
    component: Component
    report: Report
    stop: StopRequest
    environment: ProcessEnvironment
    #: "starting", "ready" or "draining"; shown in /health.
    state: str = "starting"
    draining_since: float | None = None
    #: Whether the component has started.
    started: bool = False
    host: Host = field(init=False)

    async def start(self, stack: AsyncExitStack) -> None:
        """Connects the servers, opens the status server and starts the component; `stack` ends all
        of it in reverse, after any failure, too."""
        self.report({"state": "starting", "detail": "connecting"})
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        environment, drops = self.environment, drop_counter(registry)
        # Closed last: sending the last spans may take seconds, and must delay nothing.
        whose, folder = (self.spec.namespace, self.spec.component), self.spec.certificates
        instance = f"{self.spec.component}-{self.spec.instance}"
        tracer = await stack.enter_async_context(
            open_tracer(self.spec.tracing, *whose, instance=instance)
        )
        store = await stack.enter_async_context(environment.open_store(self.spec))
        messaging = await stack.enter_async_context(environment.open_messaging(self.spec, drops))
        if environment.check is not None:
            await environment.check(self.spec, store, messaging)
        ttl_s = self.spec.lease_ttl_s
        lease = await retry_while_unavailable(lambda: stack.enter_async_context(store.lease(ttl_s)))
        hold_lease(lease.id)
        self.host = host = Host(
            spec=self.spec,
            store=store,
            messaging=messaging,
            lease=lease,
            registry=registry,
            report=self.report,
            stopping=self.stop,
            clock=environment.clock,
            drops=drops,
            tracer=tracer,
            certificates=None if folder is None else Certificates(Path(folder), *whose),
        )
        host.probes = {"/live": lambda: liveness(self._facts()), "/ready": self._ready_for_work}
        stack.enter_context(add_metrics(registry, self.spec, lease, messaging))
        status = await stack.enter_async_context(environment.open_status(host, self._health))
        host.status_url = status.url
        # Ended after the owned tasks: when the lease is lost, its exit code replaces theirs.
        await stack.enter_async_context(running(self._await_loss(), name="lease loss"))
        stack.push_async_callback(host.tasks.end)
        stack.push_async_callback(self._close)
        stack.push_async_callback(self._leave)
        facts = await self.component.start(host)
        self.state, self.started = "ready", True
        known = {"status_url": host.status_url, "lease": f"{lease.id:x}", "pid": os.getpid()}
        self.report({"state": "ready", **known, **facts})

    def interrupted(self) -> None:
        """The start was: a stop was requested."""
        self._report_draining()
        if self.stop.code != EXIT_STOPPED:
            lost = self.stop.code == EXIT_LEASE_EXPIRED
            why = self.stop.reason + (": etcd was out of reach" if lost else "")
            self.report({"state": "failed", "error": why})

    def failed(self, exc: Exception) -> int:
        """Reports a failed start. Returns the exit code."""
        if isinstance(exc, DynamoLiteError):
            error = str(exc)
        else:
            logger.error("the start failed", exc_info=exc)
            error = f"{type(exc).__name__}: {exc}"
        self.report({"state": "failed", "error": error})
        return EXIT_START_FAILED

    async def drain(self) -> None:
        self.draining_since = self.host.clock.monotonic()
        grace_s = self.spec.grace_s
        logger.info("draining for up to %g s: %s", grace_s, self.stop.reason)
        self._report_draining()
        await self._leave()
        try:
            async with asyncio.timeout(grace_s + _DRAIN_MARGIN_S):
                await self.component.drain(grace_s)
        except Exception:
            logger.exception("the drain failed or had a timeout")
        self.report({"state": "drained"})

    def _report_draining(self) -> None:
        # Known before the end, so that one that dies in its drain is not started again.
        for_good = self.stop.code == EXIT_STOPPED
        self.report({"state": "draining", "reason": self.stop.reason, "for_good": for_good})

    async def _leave(self) -> None:
        self.state = "draining"
        await self.host.deregister()

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.host.stack.aclose()
        except Exception:
            logger.exception("closing %s failed or had a timeout", self.spec.component)

    async def _await_loss(self) -> None:
        loss = await self.host.lease.lost()
        self.stop.set(f"lease {loss.value}", loss_exit_code(loss))

    def _facts(self) -> dict[str, Any]:
        if not self.started:
            return {"ok": False, "checks": {}}
        try:
            return dict(self.component.health())
        except Exception as exc:
            return {"ok": False, "error": f"{type(exc).__name__}: {exc}"}

    def _ready_for_work(self) -> ProbeBody:
        host = self.host
        return readiness(
            self._facts(), state=self.state, lease=host.lease, messaging=host.messaging
        )

    def _health(self) -> dict[str, Any]:
        facts, host, since = self._facts(), self.host, self.draining_since
        connected = host.messaging.connected
        healthy = facts.pop("ok", True) and connected and self.state == "ready"
        return {
            "ok": bool(healthy),
            "state": self.state,
            "namespace": self.spec.namespace,
            "component": self.spec.component,
            "instance": self.spec.instance,
            "lease": f"{host.lease.id:x}",
            "pid": os.getpid(),
            "version": __version__,
            **({"nats_connected": connected} if self.spec.nats_url else {}),
            "grace_s": self.spec.grace_s,
            "lease_ttl_s": self.spec.lease_ttl_s,
            # 0 before the drain.
            "draining_s": 0.0 if since is None else host.clock.monotonic() - since,
            **({"options": host.options.facts()} if host.options is not None else {}),
            **facts,
        }


def add_metrics(
    registry: CollectorRegistry, spec: ProcessSpec, lease: Lease, messaging: Messaging
) -> AbstractContextManager[object]:
    """Registers the metrics of every process. Reconnects are counted while the context lasts."""
    # Prometheus adds its own labels to all metrics of a target; these can be joined with them.
    whose = Info("dynamo_lite_process", "Which process this is.", registry=registry)
    whose.info({"dynamo_namespace": spec.namespace, "dynamo_component": spec.component})
    remaining = Gauge(
        "dynamo_lite_lease_remaining_seconds",
        "Seconds until this process's lease may expire.",
        registry=registry,
    )
    remaining.set_function(lease.remaining_s)
    if not spec.nats_url:
        return nullcontext()
    connected = Gauge("dynamo_lite_nats_connected", "1 while NATS is connected.", registry=registry)
    connected.set_function(lambda: float(messaging.connected))
    # The gauge misses outages between two scrapes.
    reconnects = Counter(
        "dynamo_lite_nats_reconnects",
        "How often the connection to NATS was lost and established again.",
        registry=registry,
    )
    return messaging.watch_connection(lambda connected: reconnects.inc(int(connected)))
