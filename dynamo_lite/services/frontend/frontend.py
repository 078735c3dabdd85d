"""The Frontend: one of vLLM's HTTP frontends over the live decode workers."""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_lite.overview.observer import Observer
from dynamo_lite.policy.admission import Admission
from dynamo_lite.policy.kv_routing import KvPicker
from dynamo_lite.policy.routing import Picker, RoundRobin
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.protocol.live_options import FrontendLiveOptions, LiveValues
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded, OnTokens
from dynamo_lite.request_plane.placement import WorkerSelector
from dynamo_lite.runtime.address import advertised_address, is_loopback
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.status import bind
from dynamo_lite.services.config import FrontendConfig, ProcessorConfig
from dynamo_lite.services.frontend.canaries import start_canaries
from dynamo_lite.services.frontend.dashboard.app import Dashboard
from dynamo_lite.services.frontend.dashboard.viewers import Viewers
from dynamo_lite.services.frontend.http import HttpServer, Probed, local_address, url_of
from dynamo_lite.services.frontend.http_relay import HttpRelay
from dynamo_lite.services.frontend.picker import open_picker
from dynamo_lite.services.frontend.processor import ENDPOINTS, Processor
from dynamo_lite.services.frontend.rotation import Rotation
from dynamo_lite.services.frontend.shared_metrics import SharedMetrics
from dynamo_lite.services.frontend.worker_check import NONE_REGISTERED, WorkerCheck, check_workers
from dynamo_lite.services.live_options import ComponentOptions, limits
from dynamo_lite.services.metrics import RequestMetrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from dynamo_lite.vllm.frontend.intake import Intake
    from dynamo_lite.vllm.frontend.openai_app import OpenAiApp
    from dynamo_lite.vllm.frontend.rust_edge import RustEdge


class Frontend:
    """The component. config: the fields of `FrontendConfig`."""

    def __init__(self, config: Mapping[str, Any] | FrontendConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, FrontendConfig)
        self._processor_config = msgspec.convert(spec.inner.get("Processor", {}), ProcessorConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._roster: Roster | None = None
        self._workers: HealthMonitor | None = None
        self._failover: FailoverClient | None = None
        self._picker: Picker | WorkerSelector = RoundRobin()
        self._app: OpenAiApp | RustEdge | None = None
        self._rust: RustEdge | None = None
        self._server: HttpServer | None = None
        self._options: ComponentOptions | None = None
        self._viewers: Viewers | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for workers: 503 until one is live.

        Returns the facts that the supervisor announces.
        """
        shared = self._spec.instances > 1
        sock = bind(self._config.host, self._config.port, shared=shared)
        self._stack.callback(sock.close)
        await self._watch_workers(host)
        assert self._roster is not None
        # Long before HTTP is served, so that it knows the workers by then.
        self._picker = await open_picker(
            self._stack, host, self._config, self._spec.namespace, self._roster
        )
        address = advertised_address(self._config.host, sock.getsockname()[1])
        if self._config.edge == "rust":
            url = await self._start_rust(host, sock, address)
        else:
            url = await self._start_python(host, sock, address)
        assert self._app is not None
        asks_key = self._app.api_key is not None
        return {"url": url, "model": self._app.served_model, "asks_key": asks_key}

    async def _start_python(self, host: Host, sock: socket.socket, address: str) -> str:
        """Returns the URL."""
        host.progress("loading the tokenizer and the OpenAI app")
        self._app = app = await self._open_app(host)
        await host.register("http", stream=address)
        await self._serve_processor(host, app.asgi, app)
        # Last: a failure after this would break accepted requests.
        return await self._serve_http(host, app, sock, address)

    async def _start_rust(self, host: Host, sock: socket.socket, address: str) -> str:
        """Returns the URL."""
        host.progress("starting vLLM's Rust frontend")
        url, local = url_of(sock), local_address(sock)
        self._app = self._rust = rust = await self._open_rust(host, sock, url)
        # Its process has a copy. With this one open, connections during a drain would wait here.
        sock.close()
        host.spawn(rust.process.run(url), "vLLM's Rust frontend")
        await host.register("http", stream=address)
        await self._serve_processor(host, HttpRelay(*local), rust)
        return url

    async def _watch_workers(self, host: Host) -> None:
        namespace, component = self._spec.namespace, self._spec.watch_component
        enter = self._stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, component, "generate")
        self._roster = await enter(Roster(host.store, prefix, host.drops))
        self._workers = await enter(
            HealthMonitor(
                host.messaging,
                self._roster,
                namespace=namespace,
                component=component,
                registry=host.registry,
                on_drop=host.drops,
            )
        )

    async def _open_app(self, host: Host) -> "OpenAiApp":
        # Importing vLLM takes seconds: in a thread, so that the loop keeps running, and after
        # the checks of the port and of etcd.
        await asyncio.to_thread(__import__, "dynamo_lite.vllm.frontend.openai_app")
        from dynamo_lite.vllm.frontend.openai_app import open_app
        from dynamo_lite.vllm.frontend.remote_core import Deliveries, RemoteCore

        deliveries = Deliveries()
        intake = await self._open_intake(host, deliveries.on_deltas, deliveries.on_ended)
        config = self._config
        return await self._stack.enter_async_context(
            open_app(
                self._spec.engine_args,
                partial(RemoteCore, intake, deliveries),
                default_timeout_s=config.default_request_timeout_s,
                max_timeout_s=config.max_request_timeout_s,
                max_body_bytes=config.max_body_bytes,
                tracer=host.tracer,
            )
        )

    async def _open_rust(self, host: Host, sock: socket.socket, url: str) -> "RustEdge":
        await asyncio.to_thread(__import__, "dynamo_lite.vllm.frontend.rust_edge")
        from dynamo_lite.vllm.frontend.rust_core import RustCore
        from dynamo_lite.vllm.frontend.rust_edge import open_rust_edge

        config = self._config
        if config.edge_binary is None:
            raise StartupError("Frontend.edge-binary: `edge: rust` needs the path of vllm-rs")
        timeout_s = min(config.default_request_timeout_s, config.max_request_timeout_s)
        core = RustCore(timeout_s=timeout_s, tracer=host.tracer)
        intake = await self._open_intake(host, core.on_deltas, core.on_ended)
        return await self._stack.enter_async_context(
            open_rust_edge(
                self._spec.engine_args,
                Path(config.edge_binary),
                sock,
                url,
                core,
                intake,
                grace_s=self._spec.grace_s,
            )
        )

    async def _open_intake(self, host: Host, on_deltas: OnDeltas, on_ended: OnEnded) -> "Intake":
        """Opens the failover client with the edge's callbacks, and admission over it."""
        from dynamo_lite.vllm.frontend.intake import Intake

        config = self._config
        failover = await self._open_failover(host, on_deltas, on_ended)
        admission = Admission(limits(config, FrontendLiveOptions()))
        refused: Counter[str] = Counter()

        def apply(values: LiveValues) -> None:
            admission.limit(limits(config, values))
            if isinstance(self._picker, KvPicker):
                self._picker.options = values.applied_to(config.kv_router)

        self._options = options = ComponentOptions(host, config, FrontendLiveOptions(), apply)
        await self._stack.enter_async_context(options.following)
        host.registry.register(RequestMetrics(failover.stats, refused, admission))
        return Intake(
            failover,
            members=self._candidates,
            admission=admission,
            refused=refused,
            client_priority=config.client_priority,
            tracer=host.tracer,
        )

    async def _open_failover(
        self, host: Host, on_deltas: OnDeltas, on_ended: OnEnded
    ) -> FailoverClient:
        assert self._roster is not None and self._workers is not None
        self._failover = failover = await self._stack.enter_async_context(
            FailoverClient(
                partial(
                    RemoteGenerateClient,
                    # A process without the secret cannot guess it and take a session's place.
                    f"{host.lease.id:x}" if host.secret is None else secrets.token_hex(16),
                    request_timeout_s=self._config.request_timeout_s,
                    on_drop=host.drops,
                    secret=host.secret,
                ),
                members=self._candidates,
                picker=self._picker,
                on_deltas=on_deltas,
                on_ended=on_ended,
                on_tokens=self._start_canaries(host),
                max_moves=self._config.max_moves,
            )
        )
        changed, leaves = failover.members_changed, failover.worker_leaves
        self._stack.enter_context(
            Rotation(self._roster, self._workers, failover.transport, changed, leaves)
        )
        return failover

    def _start_canaries(self, host: Host) -> OnTokens:
        """Returns the callback for workers that have sent tokens (`Canaries.on_tokens`)."""
        options = self._config.canary
        if not options.interval_s:
            return lambda lease_id, first: None
        from dynamo_lite.vllm.requests import canary

        assert self._roster is not None and self._workers is not None
        make = partial(canary, max_tokens=options.max_tokens)
        return start_canaries(host, options, self._roster, self._workers, make).on_tokens

    def _candidates(self) -> Sequence[EndpointRecord]:
        """Workers for a new request: the responsive ones, or all if none is responsive."""
        return self._workers.members_or_all if self._workers is not None else ()

    async def _serve_http(
        self, host: Host, app: "OpenAiApp", sock: socket.socket, address: str
    ) -> str:
        asgi = page = self._with_dashboard(host, app.asgi)
        if self._spec.instances > 1:
            asgi = await self._with_shared_metrics(host, asgi, address)
        served = asgi if host.probes is None else Probed(asgi, host.probes)
        server = HttpServer(served, sock, app.http)
        if isinstance(page, Dashboard):
            page.disconnect = server.disconnect
        app.state.server = server
        await server.start()
        self._server = server
        self._stack.push_async_callback(server.stop, 0.0)
        return url_of(sock, tls=app.http.tls is not None)

    def _with_dashboard(self, host: Host, app: "ASGIApp") -> "ASGIApp":
        """Adds the dashboard. By default only where HTTP listens on a loopback address."""
        private = is_loopback(self._config.host)
        if self._config.dashboard is False or (self._config.dashboard is None and not private):
            return app
        self._viewers = viewers = Viewers(
            lambda: Observer(host.store, host.messaging, self._spec.namespace, host.drops)
        )
        self._stack.push_async_callback(viewers.close)
        return Dashboard(app, viewers, any_name=self._config.dashboard is True)

    async def _with_shared_metrics(self, host: Host, app: "ASGIApp", address: str) -> "ASGIApp":
        prefix = names.endpoint_prefix(self._spec.namespace, self._spec.component, "http")
        frontends = await self._stack.enter_async_context(Roster(host.store, prefix, host.drops))
        return SharedMetrics(
            app, lambda: [m for m in frontends.members if m.transport.stream == address]
        )

    async def _serve_processor(
        self, host: Host, asgi: "ASGIApp", app: "OpenAiApp | RustEdge"
    ) -> None:
        processor = Processor(self._processor_config, asgi, api_key=app.api_key, on_drop=host.drops)
        for endpoint in ENDPOINTS:
            subject = names.endpoint_subject(
                self._spec.namespace, "Processor", endpoint, host.lease.id
            )
            await self._stack.enter_async_context(
                host.messaging.serve(subject, partial(processor.answer, endpoint))
            )
            await host.register(endpoint, component="Processor", model=app.served_model)

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open responses may finish within `grace_s`, then they are
        cancelled; the dashboard's streams never finish, so they are closed at once."""
        async with asyncio.TaskGroup() as closing:
            if self._viewers is not None:
                closing.create_task(self._viewers.close())
            if self._server is not None:
                closing.create_task(self._server.stop(grace_s))
            if self._rust is not None:
                closing.create_task(self._rust.process.drain(grace_s))

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        app = self._app
        trouble = app.trouble if app is not None else ""
        workers = len(self._roster.members) if self._roster is not None else 0
        responsive = len(self._workers.responsive) if self._workers is not None else 0
        check = self._check_workers()
        checks = {
            "model": "" if app is not None else "the tokenizer is not loaded yet",
            "workers": check.trouble,
        }
        if self._rust is not None:
            checks["edge"] = self._rust.unhealthy
        return {
            "ok": app is not None and not trouble and not checks.get("edge"),
            "dead": trouble,
            "checks": checks,
            "without_broker": check.without_broker,
            "workers": workers,
            "responsive": responsive,
            "requests": app.in_flight if app is not None else 0,
            "options": self._options.facts() if self._options is not None else {},
            "loads": self._failover.load_facts() if self._failover is not None else {},
        }

    def _check_workers(self) -> WorkerCheck:
        if self._roster is None or self._workers is None or self._failover is None:
            return NONE_REGISTERED
        return check_workers(self._roster, self._workers, self._failover.transport)
