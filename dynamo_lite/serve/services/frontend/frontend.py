"""The Frontend: one of vLLM's HTTP frontends over the live decode workers."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dynamo_lite.protocol import names
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.request_plane.admission import Admission
from dynamo_lite.request_plane.base import OnDeltas
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient, OnEnded
from dynamo_lite.request_plane.rotation import check_workers, rotate
from dynamo_lite.routing.kv_routing import KvPicker
from dynamo_lite.routing.pickers import Picker, Random, RoundRobin
from dynamo_lite.routing.remote_router import RemoteRouter
from dynamo_lite.runtime.address import advertised_address, is_loopback
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.runtime.process.readiness import ProbeBody
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.frontend.dashboard.app import OVERVIEW, Dashboard
from dynamo_lite.serve.services.frontend.http import HttpServer, url_of
from dynamo_lite.serve.services.frontend.http_entry import OwnPages
from dynamo_lite.serve.services.metrics import RequestMetrics
from dynamo_lite.serve.services.router import open_kv_picker
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import find_program

if TYPE_CHECKING:
    from dynamo_lite.vllm.frontend.intake import Intake
    from dynamo_lite.vllm.frontend.openai_app import OpenAiApp
    from dynamo_lite.vllm.frontend.rust_edge import RustEdge

#: What the app does, as the component Processor: chat template, tokens, text.
_PROCESSOR = ("chat/completions", "completions")


class Frontend:
    def __init__(self, config: Mapping[str, Any] | FrontendConfig):
        self._config = msgspec.convert(config, FrontendConfig)
        self._rust: RustEdge | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for workers: 503 until one is live.

        Returns the facts that the supervisor announces.
        """
        self._host = host
        shared = host.spec.instances > 1
        sock = bind(self._config.host, self._config.port, shared=shared)
        host.stack.callback(sock.close)
        await self._watch_workers()
        address = advertised_address(self._config.host, sock.getsockname()[1])
        url, python = url_of(sock), None
        if self._config.edge == "rust":
            host.progress("starting vLLM's Rust frontend")
            self._rust = app = await self._open_rust(sock, url)
            # Its process has a copy. With this one open, connections would wait here in a drain.
            sock.close()
            host.spawn(app.process.run(url), "vLLM's Rust frontend")
            self._end = app.process.drain
        else:
            host.progress("loading the tokenizer and the OpenAI app")
            app = python = await self._open_app()
        self._app = app
        await host.register("http", stream=address)
        for endpoint in _PROCESSOR:
            await host.register(endpoint, component="Processor", model=app.served_model)
        if python is not None:
            # Last: a failure after this would break accepted requests.
            url = await self._serve_http(python, sock)
        return {"url": url, "model": app.served_model, "asks_key": app.api_key is not None}

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open responses may finish within `grace_s`, then they are
        cancelled."""
        await self._end(grace_s)

    def health(self) -> dict[str, Any]:
        app, check = self._app, check_workers(self._roster, self._health, self._failover.transport)
        checks = {"workers": check.trouble}
        if self._rust is not None:
            checks["edge"] = self._rust.unhealthy
        return {
            "ok": not app.trouble and not checks.get("edge"),
            "dead": app.trouble,
            "checks": checks,
            "without_broker": check.without_broker,
            "requests": app.in_flight,
            "workers": len(self._roster.members),
            "responsive": len(self._health.responsive),
        }

    # The way to the decode workers

    async def _watch_workers(self) -> None:
        """Long before `_open_intake`, so that the workers are known by then."""
        host, component = self._host, self._host.spec.watch_component
        namespace, enter = host.spec.namespace, host.stack.enter_async_context
        self._roster = await self._open_roster(component, "generate")
        self._health = await enter(
            HealthMonitor(
                host.messaging,
                self._roster,
                namespace=namespace,
                component=component,
                registry=host.registry,
                on_drop=host.drops,
            )
        )
        self._picker = await self._open_picker()

    async def _open_roster(self, component: str, endpoint: str) -> Roster:
        host = self._host
        prefix = names.endpoint_prefix(host.spec.namespace, component, endpoint)
        return await host.stack.enter_async_context(Roster(host.store, prefix, host.drops))

    async def _open_picker(self) -> Picker:
        match self._config.router:
            case "random":
                return Random(random.Random().randrange)
            case "kv":
                return await open_kv_picker(self._host, self._roster, self._config.kv_router)
            case "component":
                router = RemoteRouter(self._host, await self._open_roster("Router", "pick"))
                self._host.spawn(router.publish_outcomes(), "router-outcomes")
                return router
            case "round-robin":
                return RoundRobin()

    async def _open_intake(self, on_deltas: OnDeltas, on_ended: OnEnded) -> "Intake":
        """Opens the failover client with the edge's callbacks, and admission over it."""
        from dynamo_lite.vllm.frontend.intake import Intake

        host, config, picker = self._host, self._config, self._picker
        connect = partial(
            RemoteGenerateClient,
            f"{host.lease.id:x}",
            on_drop=host.drops,
            certificates=host.certificates,
            component=host.spec.watch_component,
        )
        self._failover = failover = await host.stack.enter_async_context(
            FailoverClient(connect, picker=picker, on_deltas=on_deltas, on_ended=on_ended)
        )
        await rotate(
            host.stack, self._roster, self._health, failover.transport, failover.set_members
        )
        admission = Admission(config)
        refused: Counter[str] = Counter()

        def apply(values: Values) -> None:
            admission.limit(applied(values, config))
            if isinstance(picker, KvPicker):
                picker.options = applied(values, config.kv_router, "kv_router")

        await host.stack.enter_async_context(host.live_options(config, apply))
        host.registry.register(RequestMetrics(failover.stats, refused, admission))
        return Intake(
            failover,
            admission=admission,
            refused=refused,
            client_priority=config.client_priority,
            tracer=host.tracer,
        )

    # The edges

    async def _open_app(self) -> "OpenAiApp":
        # After the checks of the port and of etcd, because it takes seconds.
        await asyncio.to_thread(import_large, "dynamo_lite.vllm.frontend.openai_app")
        from dynamo_lite.vllm.frontend.graph_adapters import AdapterStore
        from dynamo_lite.vllm.frontend.openai_app import open_app

        host, config, adapters = self._host, self._config, None
        if config.adapter_folder is not None:
            adapters = AdapterStore(
                host.store, host.spec.namespace, config.adapter_folder, host.drops
            )
        return await host.stack.enter_async_context(
            open_app(
                host.spec.engine_args,
                self._open_intake,
                default_timeout_s=config.default_request_timeout_s,
                max_timeout_s=config.max_request_timeout_s,
                max_body_bytes=config.max_body_bytes,
                adapters=adapters,
            )
        )

    async def _open_rust(self, sock: socket.socket, url: str) -> "RustEdge":
        await asyncio.to_thread(import_large, "dynamo_lite.vllm.frontend.rust_edge")
        from dynamo_lite.vllm.frontend.rust_edge import open_rust_edge

        host, config = self._host, self._config
        program = await asyncio.to_thread(find_program, config.edge_binary, vllm_version())
        return await host.stack.enter_async_context(
            open_rust_edge(
                host.spec.engine_args,
                program,
                sock,
                url,
                self._open_intake,
                timeout_s=min(config.default_request_timeout_s, config.max_request_timeout_s),
                grace_s=host.spec.grace_s,
            )
        )

    async def _serve_http(self, app: "OpenAiApp", sock: socket.socket) -> str:
        host = self._host
        pages = [Route(path, probe(make)) for path, make in host.probes.items()]
        served = OwnPages(app.asgi, [*pages, *await self._dashboard()])
        quiet = replace(app.http, quiet_paths=app.http.quiet_paths | {OVERVIEW})
        server = HttpServer(served, sock, quiet, on_drop=host.drops)
        app.state.server = server
        await server.start()
        self._end = server.stop
        host.stack.push_async_callback(server.stop, 0.0)
        return url_of(sock, tls=app.http.tls is not None)

    async def _dashboard(self) -> list[Route]:
        """By default only where HTTP listens on a loopback address."""
        host, wanted = self._host, self._config.dashboard
        if wanted is False or (wanted is None and not is_loopback(self._config.host)):
            return []
        observer = Observer(
            host.store, host.spec.namespace, host.drops, certificates=host.certificates
        )
        await host.stack.enter_async_context(observer)
        return Dashboard(observer, any_name=wanted is True).pages


def probe(make: Callable[[], ProbeBody]) -> Callable[[Request], Awaitable[Response]]:
    """The page of a probe of this process."""

    async def answer(_: Request) -> Response:
        facts = make()
        return JSONResponse(facts, status_code=200 if facts["ok"] else 503)

    return answer
