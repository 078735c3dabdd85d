"""The status server of one process: `/health`, `/live`, `/ready`, `/metrics`, `/metrics/vllm`.

Over HTTPS everybody who reaches it may read the first three, as probes do, and the other routes
only who has a certificate of the graph.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.web_server import WebServer

#: Path of the metrics that vLLM keeps in this process; a Frontend's HTTP port has them, too.
VLLM_METRICS = "/metrics/vllm"

_KEEP_ALIVE_S = 5.0
_STOP_S = 1.0


class StatusServer:
    """Async context manager. `health` returns facts; without `ok` True the status is 503.

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
        probes: Probes = MappingProxyType({}),
        vllm_registry: CollectorRegistry | None = None,
        certificates: Certificates | None = None,
    ):
        self._facts, self._on_drop = {"/health": health, **probes}, on_drop
        self._registries = {"/metrics": registry, VLLM_METRICS: vllm_registry}
        self._host, self._port, self._certificates = host, port, certificates
        self._server: WebServer | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self._certificates else "http"
        return f"{scheme}://{advertised_address(self._host, self._port)}"

    async def __aenter__(self) -> Self:
        """Raises StartupError when it cannot listen."""
        try:
            sock = bind(self._host, self._port)
        except StartupError as exc:
            why = f"{exc}; choose another status-port or bind-host"
            raise StartupError(why) from exc
        self._port = sock.getsockname()[1]
        self._server = WebServer(
            self._answer,
            sock,
            None if self._certificates is None else self._certificates.open_server,
            on_drop=lambda: self._on_drop("status"),
            keepalive_timeout=_KEEP_ALIVE_S,
            lingering_time=0.0,
        )
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(_STOP_S)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405)
        if (make := self._facts.get(request.path)) is not None:
            facts = make()
            return _json(facts, 200 if facts.get("ok") else 503)
        if (registry := self._registries.get(request.path)) is None:
            return web.Response(status=404)
        if (own := self._certificates) is not None:
            if why := own.refusal(request.get_extra_info("ssl_object")):
                return _json({"error": f"only for the graph's components: {why}"}, 403)
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _json(content: Mapping[str, Any], status: int) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
