"""The status server of one process: `/health`, `/live`, `/ready`, `/metrics`, `/metrics/vllm`.

Over HTTPS everybody who reaches it may read the first three, as probes do, and the other routes
only who has a certificate of the graph.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.bounded_server import BoundedServer
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.pending_connections import PendingConnections
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.request_head import UvicornHeadDeadline, most_pending
from dynamo_lite.runtime.tasks import OwnedTasks

#: Path of the metrics that vLLM keeps in this process; a Frontend's HTTP port has them, too.
VLLM_METRICS = "/metrics/vllm"

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2.0


class StatusServer:
    """Async context manager. `health` returns facts; without `ok` True the status is 503.

    probes: None serves neither `/live` nor `/ready`.
    vllm_registry: where vLLM keeps the metrics of this process; None does not serve
    `/metrics/vllm`. certificates: of this process, for HTTPS; None: HTTP.
    """

    def __init__(
        self,
        health: Callable[[], Mapping[str, Any]],
        registry: CollectorRegistry,
        host: str = "127.0.0.1",
        port: int = 0,
        on_drop: OnDrop = uncounted,
        probes: Probes | None = None,
        vllm_registry: CollectorRegistry | None = None,
        certificates: Certificates | None = None,
    ):
        self._health, self._probes = health, probes
        self._on_drop = on_drop
        self._registry, self._vllm_registry = registry, vllm_registry
        self._host, self._certificates = host, certificates
        self._port = port
        self._tasks = OwnedTasks()
        self._server: _Server | None = None
        self._listener: socket.socket | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self._certificates else "http"
        return f"{scheme}://{advertised_address(self._host, self._port)}"

    async def __aenter__(self) -> Self:
        """Raises StartupError when the address cannot be bound."""
        self._listener = listener = bind(self._host, self._port)
        self._port = listener.getsockname()[1]
        app = Starlette(routes=self._routes())
        pending = PendingConnections(most_pending(), lambda: self._on_drop("status"))
        config = uvicorn.Config(
            app,
            http=partial(  # pyright: ignore[reportArgumentType]
                _Protocol,
                on_drop=self._on_drop,
                pending=pending,
                certificates=self._certificates,
            ),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = server = _Server(config, pending, self._certificates)
        task = self._tasks.start(server.serve([listener]), name="status server")
        started = self._tasks.start(server.up.wait(), name="status server is up")
        try:
            await asyncio.wait(
                {started, task}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not server.up.is_set():
                raise StartupError(f"the status server on {self.url} did not start")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.should_exit = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._tasks.join()
        finally:
            # uvicorn leaves them open when it is ended or cancelled during its start.
            for listening in getattr(server, "servers", []):
                listening.close()
            if self._listener is not None:
                self._listener.close()
            await server.stop_accepting()

    def _routes(self) -> list[Route]:
        routes = [
            Route("/health", self._get_health),
            Route("/metrics", _metrics_page(self._registry)),
        ]
        if self._vllm_registry is not None:
            routes.append(Route(VLLM_METRICS, _metrics_page(self._vllm_registry)))
        if self._probes is not None:
            routes += [Route(path, self._get_probe) for path in ("/live", "/ready")]
        return routes

    async def _get_health(self, _: Request) -> Response:
        return _answer(self._health())

    async def _get_probe(self, request: Request) -> Response:
        assert self._probes is not None
        return _answer(self._probes.at(request.url.path) or {})


def _metrics_page(registry: CollectorRegistry) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        if why := getattr(request.state, "refusal", ""):
            facts = {"error": f"only for the graph's components: {why}"}
            return JSONResponse(facts, status_code=403)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return page


def _answer(facts: Mapping[str, Any]) -> Response:
    return JSONResponse(dict(facts), status_code=200 if facts.get("ok") else 503)


class _Protocol(UvicornHeadDeadline, H11Protocol):
    """h11 limits the size of a request head. Invalid requests are counted under "status".

    `state.refusal` of a request says why the client may not read the graph's metrics.
    """

    def __init__(
        self,
        *args: Any,
        on_drop: OnDrop,
        pending: PendingConnections,
        certificates: Certificates | None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._on_drop, self.pending, self._certificates = on_drop, pending, certificates

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._certificates is not None:
            why = self._certificates.refusal(transport.get_extra_info("ssl_object"))
            self.app_state = {**self.app_state, "refusal": why}
        super().connection_made(transport)

    def send_400_response(self, msg: str) -> None:
        self._on_drop("status")
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the response to an earlier request is being sent
            self.transport.close()


class _Server(BoundedServer):
    """It installs no signal handlers, and sets `up` when it accepts connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        pending: PendingConnections,
        certificates: Certificates | None,
    ):
        super().__init__(config, pending)
        self._certificates = certificates
        self.up = asyncio.Event()

    def context(self) -> ssl.SSLContext | None:
        return None if self._certificates is None else self._certificates.open_server()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
