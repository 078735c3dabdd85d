"""The Frontend's HTTP server: uvicorn on a socket that is bound early, and probes.

Applies TLS and the limits on a request's head. The socket is bound before the model is
loaded, so that a port in use is reported at once. The process host handles signals, not
uvicorn.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dynamo_lite.protocol.errors import DynamoLiteError, StartupError
from dynamo_lite.runtime.address import local_url
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import PendingConnections, TcpServer
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.request_head import RequestHeadDeadline, most_pending
from dynamo_lite.runtime.tasks import running
from dynamo_lite.vllm.access_log import QuietPaths
from dynamo_lite.vllm.http_options import HttpOptions, TlsOptions

logger = logging.getLogger(__name__)

_BACKLOG = 2048

#: How often the certificate's files are read again.
_REFRESH_S = 5.0

#: How long the app may take to notice that its clients are disconnected.
_DISCONNECT_S = 3.0


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The server's URL for a client on this host."""
    return local_url(*sock.getsockname()[:2], tls=tls)


class Probed:
    """ASGI middleware: the process's `/live` and `/ready` on the HTTP port.

    They do not reach the app, so they are cheap and need no API key. HEAD reaches it as GET: vLLM's
    routes do not know it, and uvicorn sends no body in answer to it.
    """

    def __init__(self, app: ASGIApp, probes: Probes):
        self._app, self._probes = app, probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            if (make := self._probes.get(scope["path"])) is not None:
                facts = make()
                status = 200 if facts["ok"] else 503
                return await JSONResponse(facts, status_code=status)(scope, receive, send)
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class _Protocol(RequestHeadDeadline, HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head, whose size the parser does not limit."""

    max_head_bytes: int
    max_headers: int
    _head_bytes = 0
    _refused = False

    def in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        # One read may have brought the whole head and a part of the body.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_head_bytes and not self._refused:
            self._refuse()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
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


def _protocol(options: HttpOptions, pending: PendingConnections) -> type[asyncio.Protocol]:
    limits = {"max_head_bytes": options.max_head_bytes, "max_headers": options.max_headers}
    return type("LimitedProtocol", (_Protocol,), limits | {"pending": pending})


class HttpServer(uvicorn.Server):
    """`start` returns when connections are accepted; `stop` is idempotent.

    refresh_s: how often the certificate's files are read again, if TLS is to refresh. on_drop:
    called with "http" for a connection that is closed because too many have no request.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        options: HttpOptions | None = None,
        *,
        refresh_s: float = _REFRESH_S,
        on_drop: OnDrop = uncounted,
    ):
        self._options, self._refresh_s = options or HttpOptions(), refresh_s
        self._pending = PendingConnections(most_pending(), lambda: on_drop("http"))
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(self._options, self._pending),
                ws="none",
                lifespan="on",
                # The process has already configured logging.
                log_config=None,
                log_level=self._options.log_level,
                access_log=self._options.access_log,
                timeout_keep_alive=self._options.keep_alive_s,
            )
        )
        self._sock = sock
        self._listening: TcpServer | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Raises StartupError when the socket cannot listen, TLS cannot be set up, or the app's own
        startup fails."""
        self.config.load()
        if (tls := self._options.tls) is not None:
            self.config.ssl = tls.context()
            if tls.refresh:
                refresh = _refresh(self.config.ssl, tls, self._refresh_s)
                await self._stack.enter_async_context(running(refresh, name="tls-refresh"))
        quiet = QuietPaths(self._options.quiet_paths)
        access = logging.getLogger("uvicorn.access")
        access.addFilter(quiet)
        self._stack.callback(access.removeFilter, quiet)
        self.lifespan = self.config.lifespan_class(self.config)
        context, make, pending = self.config.ssl, self._connection, self._pending
        tls = None if context is None else lambda: context
        self._listening = TcpServer(self._sock, make, pending, tls, backlog=_BACKLOG)
        try:
            await self.startup(sockets=[])  # everything but the listening
            await self._listening.start()
        except StartupError:
            await self.lifespan.shutdown()
            await self._stack.aclose()
            raise
        except SystemExit as exc:
            # uvicorn would end the process at once: the app's own startup has failed.
            await self._stack.aclose()
            raise StartupError("the HTTP app has failed to start; the log says why") from exc
        self._ticks = asyncio.create_task(self.main_loop(), name="http-ticks")

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits up to `grace_s` for open responses, then disconnects the rest.

        A disconnect, not a cancellation, makes vLLM's app abort a request at its worker.
        """
        ticks, self._ticks = self._ticks, None
        if ticks is None:
            return
        # As a context: a cancel in one step must not skip the next one.
        async with self._stack:
            self.should_exit = True
            stopping = asyncio.create_task(self.shutdown(sockets=[self._sock]), name="http-stop")
            try:
                await asyncio.wait({stopping}, timeout=grace_s)
            finally:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
                try:
                    await asyncio.wait({stopping}, timeout=_DISCONNECT_S)
                finally:
                    # Ends uvicorn's own waits.
                    self.force_exit = True
                    await stopping
                    await ticks

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listening is not None:
            await self._listening.close()
        await super().shutdown(sockets=sockets)

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(
            config=self.config,  # pyright: ignore[reportCallIssue]
            server_state=self.server_state,  # pyright: ignore[reportCallIssue]
            app_state=self.lifespan.state,  # pyright: ignore[reportCallIssue]
        )


async def _refresh(context: ssl.SSLContext, tls: TlsOptions, every_s: float) -> None:
    """Loads the certificate's files into `context` again and again, for new connections."""
    while True:
        await asyncio.sleep(every_s)
        try:
            # First into a new context: a half-replaced pair must not damage the one in use.
            tls.context()
            tls.load(context)
        except (DynamoLiteError, OSError, ValueError) as exc:
            logger.warning("cannot reload the TLS certificate, keeping the old one: %s", exc)
