"""The HTTP listener of the Frontend: uvicorn on a socket that is bound early, and probes.

Owns TLS and the limits on a request's head. Binding comes before the model is read, so that
a taken port is found at once. Signals are the process host's, not uvicorn's.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.tasks import running
from dynamo_lite.vllm.http_options import HttpOptions, QuietPaths, TlsOptions

_log = logging.getLogger(__name__)

_BACKLOG = 2048

#: How often the files of a certificate are looked at.
_REFRESH_S = 5.0

#: How long the app may take to notice that its clients are gone.
_HANG_UP_S = 3.0


def bind(host: str, port: int) -> socket.socket:
    """Raises StartupError when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise StartupError(f"cannot listen on {host_port(host, port)}: {exc.strerror}") from exc
    return sock


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Where a client on this machine reaches the listener."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{'https' if tls else 'http'}://{host_port(host, port)}"


class Probed:
    """ASGI middleware: `/live` and `/ready` of the process, for whoever asks at this port.

    Outside of the app, so that they cost little and ask for no key.
    """

    def __init__(self, app: ASGIApp, probes: Probes):
        self._app, self._probes = app, probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            if (facts := self._probes.at(scope["path"])) is not None:
                status = 200 if facts["ok"] else 503
                return await JSONResponse(facts, status_code=status)(scope, receive, send)
        await self._app(scope, receive, send)


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with limits on the head of a request: the parser keeps a head of any size."""

    max_head_bytes: int
    max_headers: int
    _head_bytes = 0
    _refused = False

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self.max_head_bytes and not self._refused:
            self._refuse()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.max_headers and not self._refused:
            self._refuse()

    def on_headers_complete(self) -> None:
        # The head may have come at one go, with the body behind it.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_head_bytes and not self._refused:
            self._refuse()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # A body is no part of a head.
        self._head_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def _refuse(self) -> None:
        self._refused = True
        self.send_400_response("The request's headers are too many or too large.")


def _protocol(options: HttpOptions) -> type[asyncio.Protocol]:
    limits = {"max_head_bytes": options.max_head_bytes, "max_headers": options.max_headers}
    return type("LimitedProtocol", (_Protocol,), limits)


class HttpServer(uvicorn.Server):
    """`start` returns when connections are accepted; `stop` is idempotent."""

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        options: HttpOptions | None = None,
        *,
        refresh_s: float = _REFRESH_S,
    ):
        self._options, self._refresh_s = options or HttpOptions(), refresh_s
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(self._options),
                ws="none",
                lifespan="on",
                # The process has configured logging already.
                log_config=None,
                log_level=self._options.log_level,
                access_log=self._options.access_log,
                timeout_keep_alive=self._options.keep_alive_s,
                backlog=_BACKLOG,
            )
        )
        self._sock = sock
        self._ticks: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Raises StartupError when the socket cannot listen, or TLS is not set up right."""
        self.config.load()
        if (tls := self._options.tls) is not None:
            self.config.ssl = tls.context()
            if tls.refresh:
                await self._stack.enter_async_context(
                    _refreshed(self.config.ssl, tls, self._refresh_s)
                )
        if self._options.quiet_paths:
            quiet = QuietPaths(self._options.quiet_paths)
            logger = logging.getLogger("uvicorn.access")
            logger.addFilter(quiet)
            self._stack.callback(logger.removeFilter, quiet)
        self.lifespan = self.config.lifespan_class(self.config)
        try:
            await self.startup(sockets=[self._sock])
        except OSError as exc:
            await self.lifespan.shutdown()
            await self._stack.aclose()
            raise StartupError(f"cannot listen: {exc.strerror}") from exc
        self._ticks = asyncio.create_task(self.main_loop(), name="http-ticks")

    def hang_up(self, scope: Scope) -> None:
        """Closes the connection of a request whose client does not read what it is sent."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.scope is scope:
                connection.transport.abort()

    async def stop(self, grace_s: float) -> None:
        """Accepts no more, waits for open responses, then hangs up on the rest.

        Hanging up, not cancelling: a disconnect is what makes vLLM's app abort
        a request at its worker.
        """
        ticks, self._ticks = self._ticks, None
        if ticks is None:
            return
        await self._stack.aclose()
        self.should_exit = True
        stopping = asyncio.create_task(self.shutdown(sockets=[self._sock]), name="http-stop")
        try:
            await asyncio.wait({stopping}, timeout=grace_s)
        finally:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({stopping}, timeout=_HANG_UP_S)
            # Makes uvicorn's own waits end, whatever is left.
            self.force_exit = True
            await stopping
            await ticks


@contextlib.asynccontextmanager
async def _refreshed(
    context: ssl.SSLContext, tls: TlsOptions, every_s: float
) -> AsyncIterator[None]:
    """New connections get the certificate that the files hold by then."""

    async def follow() -> None:
        seen = _versions(tls)
        while True:
            await asyncio.sleep(every_s)
            if (now := _versions(tls)) != seen:
                seen = now
                _reload(context, tls)

    async with running(follow(), name="tls-refresh"):
        yield


def _versions(tls: TlsOptions) -> list[tuple[int, int] | None]:
    """Of the files; they are looked up anew each time, so that links may be replaced."""
    versions: list[tuple[int, int] | None] = []
    for path in tls.files:
        try:
            stat = Path(path).stat()
        except OSError:
            versions.append(None)
        else:
            versions.append((stat.st_mtime_ns, stat.st_ino))
    return versions


def _reload(context: ssl.SSLContext, tls: TlsOptions) -> None:
    try:
        # Tried on another one: half of a new pair must not spoil the one in use.
        tls.context()
        tls.load(context)
    except (StartupError, OSError, ValueError) as exc:
        _log.warning("the certificate is not renewed: %s", exc)
    else:
        _log.info("the certificate was read again")
