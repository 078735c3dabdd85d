"""The Frontend: one of vLLM's HTTP frontends over the live decode workers."""

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_lite.runtime.address import advertised_address, is_loopback
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.serve.services.config import FrontendConfig
from dynamo_lite.serve.services.frontend.dashboard.app import OVERVIEW, Dashboard
from dynamo_lite.serve.services.frontend.dispatcher import RequestDispatcher
from dynamo_lite.serve.services.frontend.http import HttpServer, Probed, url_of
from dynamo_lite.vllm.compat import vllm_version
from dynamo_lite.vllm.edge_choice import find_program

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from dynamo_lite.vllm.frontend.openai_app import OpenAiApp
    from dynamo_lite.vllm.frontend.rust_edge import RustEdge

#: What the app does, as the component Processor: chat template, tokens, text.
_PROCESSOR = ("chat/completions", "completions")


class Frontend:
    def __init__(self, config: Mapping[str, Any] | FrontendConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, FrontendConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._dispatcher = RequestDispatcher(self._config, spec, self._stack)
        self._rust: RustEdge | None = None
        self._server: HttpServer | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for workers: 503 until one is live.

        Returns the facts that the supervisor announces.
        """
        shared = self._spec.instances > 1
        sock = bind(self._config.host, self._config.port, shared=shared)
        self._stack.callback(sock.close)
        await self._dispatcher.watch_workers(host)
        address = advertised_address(self._config.host, sock.getsockname()[1])
        url, python = url_of(sock), None
        if self._config.edge == "rust":
            host.progress("starting vLLM's Rust frontend")
            self._rust = app = await self._open_rust(host, sock, url)
            # Its process has a copy. With this one open, connections would wait here in a drain.
            sock.close()
            host.spawn(app.process.run(url), "vLLM's Rust frontend")
        else:
            host.progress("loading the tokenizer and the OpenAI app")
            app = python = await self._open_app(host)
        self._app = app
        await host.register("http", stream=address)
        for endpoint in _PROCESSOR:
            await host.register(endpoint, component="Processor", model=app.served_model)
        if python is not None:
            # Last: a failure after this would break accepted requests.
            url = await self._serve_http(host, python, sock)
        return {"url": url, "model": app.served_model, "asks_key": app.api_key is not None}

    async def _open_app(self, host: Host) -> "OpenAiApp":
        # After the checks of the port and of etcd, because it takes seconds.
        await asyncio.to_thread(import_large, "dynamo_lite.vllm.frontend.openai_app")
        from dynamo_lite.vllm.frontend.graph_adapters import AdapterStore
        from dynamo_lite.vllm.frontend.openai_app import open_app

        config = self._config
        adapters = None
        if config.adapter_folder is not None:
            adapters = AdapterStore(
                host.store, self._spec.namespace, config.adapter_folder, host.drops
            )
        return await self._stack.enter_async_context(
            open_app(
                self._spec.engine_args,
                partial(self._dispatcher.open_intake, host),
                default_timeout_s=config.default_request_timeout_s,
                max_timeout_s=config.max_request_timeout_s,
                max_body_bytes=config.max_body_bytes,
                adapters=adapters,
            )
        )

    async def _open_rust(self, host: Host, sock: socket.socket, url: str) -> "RustEdge":
        await asyncio.to_thread(import_large, "dynamo_lite.vllm.frontend.rust_edge")
        from dynamo_lite.vllm.frontend.rust_edge import open_rust_edge

        config = self._config
        program = await asyncio.to_thread(find_program, config.edge_binary, vllm_version())
        return await self._stack.enter_async_context(
            open_rust_edge(
                self._spec.engine_args,
                program,
                sock,
                url,
                partial(self._dispatcher.open_intake, host),
                timeout_s=min(config.default_request_timeout_s, config.max_request_timeout_s),
                grace_s=self._spec.grace_s,
            )
        )

    async def _serve_http(self, host: Host, app: "OpenAiApp", sock: socket.socket) -> str:
        asgi = await self._with_dashboard(host, app.asgi)
        served = Probed(asgi, host.probes)
        quiet = replace(app.http, quiet_paths=app.http.quiet_paths | {OVERVIEW})
        server = HttpServer(served, sock, quiet, on_drop=host.drops)
        app.state.server = server
        await server.start()
        self._server = server
        self._stack.push_async_callback(server.stop, 0.0)
        return url_of(sock, tls=app.http.tls is not None)

    async def _with_dashboard(self, host: Host, app: "ASGIApp") -> "ASGIApp":
        """Adds the dashboard. By default only where HTTP listens on a loopback address."""
        private = is_loopback(self._config.host)
        if self._config.dashboard is False or (self._config.dashboard is None and not private):
            return app
        observer = Observer(
            host.store,
            self._spec.namespace,
            host.drops,
            certificates=host.certificates,
        )
        await self._stack.enter_async_context(observer)
        return Dashboard(app, observer, any_name=self._config.dashboard is True)

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open responses may finish within `grace_s`, then they are
        cancelled."""
        async with asyncio.TaskGroup() as closing:
            if self._server is not None:
                closing.create_task(self._server.stop(grace_s))
            if self._rust is not None:
                closing.create_task(self._rust.process.drain(grace_s))

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        app, check = self._app, self._dispatcher.check()
        checks = {"workers": check.trouble}
        if self._rust is not None:
            checks["edge"] = self._rust.unhealthy
        return {
            "ok": not app.trouble and not checks.get("edge"),
            "dead": app.trouble,
            "checks": checks,
            "without_broker": check.without_broker,
            "requests": app.in_flight,
            **self._dispatcher.facts(),
        }
