"""The Forwarder's HTTP server.

aiohttp's low-level server: its parser is in C, and its handlers are cancelled when their client
disconnects. No web framework lies between a socket and the workflow.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import HttpVersion11, web

from dynamo_lite.forward import headers
from dynamo_lite.forward.client import Answer, Client, ClientGone, Incoming, error, send
from dynamo_lite.forward.http_client import HttpClient
from dynamo_lite.forward.named import read_headers
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.pending_connections import PendingConnections
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.request_head import RequestHeadDeadline, most_pending
from dynamo_lite.runtime.tls_acceptor import HANDSHAKE_S, TlsAcceptor

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_MAX_FIELD_BYTES = 16 << 10
_MAX_HEADERS = 128
#: How long a refused body is still read, so that its client reads the answer.
_LINGER_S = 2.0
_NO_GRACE_S = 0.001
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Paths that the Forwarder answers itself. If they were passed on, any of the engines would
#: answer.
OWN = frozenset({"/health", "/live", "/ready", "/metrics"})

ReadFacts = Callable[[], Mapping[str, Any]]


class Answering(Protocol):
    """Answers one request. Both raise ClientGone."""

    async def generate(self, incoming: Incoming, route: str, data: bytes, client: Client) -> None:
        """route: of a request to generate."""
        ...

    async def pass_on(self, incoming: Incoming, data: bytes, client: Client) -> None:
        """Any other request."""
        ...


class ForwardServer:
    """`start` returns when connections are accepted; `stop` is idempotent.

    routes: those that generate. health: the facts, with `ok`. probes: None: neither `/live` nor
    `/ready` is answered. own: paths that are answered here. tls: None: plain HTTP is served.
    on_drop: called with "http" for a connection that is closed because too many have no request.
    """

    def __init__(
        self,
        forwarding: Answering,
        config: ForwarderConfig,
        routes: frozenset[str],
        sock: socket.socket,
        *,
        health: ReadFacts,
        probes: Probes | None = None,
        own: frozenset[str] = OWN,
        tls: ssl.SSLContext | None = None,
        on_drop: OnDrop = uncounted,
    ):
        self._forwarding, self._config, self._routes = forwarding, config, routes
        self._sock, self._health, self._probes = sock, health, probes
        self._paths, self._tls = own, tls
        self._pending = PendingConnections(most_pending(), lambda: on_drop("http"))
        self._listener: asyncio.Server | None = None
        self._acceptor: TlsAcceptor | None = None
        self._web: web.Server | None = None

    async def start(self) -> None:
        """Raises StartupError when the socket cannot listen."""
        loop = asyncio.get_running_loop()
        self._web = server = web.Server(self._handle, handler_cancellation=True)
        connection = partial(
            _Connection,
            server,
            pending=self._pending,
            loop=loop,
            access_log=None,  # pyright: ignore[reportArgumentType]
            logger=_parser_logger(),
            auto_decompress=False,
            lingering_time=_LINGER_S,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            max_headers=_MAX_HEADERS,
        )
        try:
            if self._tls is None:
                self._listener = await loop.create_server(
                    connection, sock=self._sock, backlog=_BACKLOG
                )
            else:
                self._acceptor = TlsAcceptor(
                    self._sock,
                    connection,
                    self._tls,
                    self._pending,
                    handshake_s=HANDSHAKE_S,
                    backlog=_BACKLOG,
                )
                self._acceptor.start()
        except OSError as exc:
            where = self._sock.getsockname()
            raise StartupError(f"cannot listen on {where}: {exc.strerror}") from exc

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits up to `grace_s` for open answers, then disconnects the rest."""
        listener, self._listener = self._listener, None
        acceptor, self._acceptor = self._acceptor, None
        if self._web is None:
            return
        if listener is not None:
            listener.close()
        if acceptor is not None:
            await acceptor.close()
        if listener is not None or acceptor is not None:
            self._web.pre_shutdown()
        # Runs even if an earlier call was cancelled and has left connections open. For aiohttp a
        # timeout of 0 means no limit.
        await self._web.shutdown(max(grace_s, _NO_GRACE_S))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = HttpClient(request, self._config.idle_timeout_s)
        try:
            await self._answer(request, client)
        except ClientGone:
            # The connection is closed, but aiohttp still requires a response.
            logger.debug("the client of %s has disconnected", request.path)
        except Exception:
            logger.exception("a request to %s failed", request.path)
            if client.started:
                client.abort()
            else:
                await send(client, error(500, "InternalServerError", "the Forwarder failed"))
        return client.response or web.Response(status=500)

    async def _answer(self, request: web.BaseRequest, client: HttpClient) -> None:
        path = request.raw_path
        if request.method not in _METHODS or not path.startswith("/"):
            refusal = error(405, "MethodNotAllowed", "expected a path and a usual method")
            return await send(client, refusal)
        if request.path in self._paths and request.method in ("GET", "HEAD"):
            return await send(client, self._own(request.path))
        incoming = Incoming(
            method=request.method,
            path=path,
            headers=headers.to_engine(request.headers),
            client_id=headers.client_id(request.headers),
            named=read_headers(request.headers),
        )
        try:
            data = await self._body(request)
        except _Refused as refused:
            return await send(client, refused.answer)
        if request.method == "POST" and request.path in self._routes:
            await self._forwarding.generate(incoming, request.path, data, client)
        else:
            await self._forwarding.pass_on(incoming, data, client)

    def _own(self, path: str) -> Answer:
        if path == "/metrics":
            text = "metrics are at the status URL that `dynamo-lite ps` shows, and at each engine"
            return error(404, "NotFoundError", text)
        found = self._probes.at(path) if self._probes is not None else None
        facts = dict(found if found is not None else self._health())
        status = 200 if facts.get("ok") else 503
        return Answer(status, {"content-type": "application/json"}, msgspec.json.encode(facts))

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Raises _Refused, ClientGone."""
        if not request.can_read_body:
            return b""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            # An encoded body cannot be read, so forbidden fields could not be removed from it.
            text = f"content-encoding {encoding!r} is not accepted: send the body as it is"
            raise _Refused(error(415, "UnsupportedMediaType", text))
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise _Refused(self._too_large())
        await _continue(request)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while part := await request.content.readany():
                    size += len(part)
                    if size > self._config.max_body_bytes:
                        raise _Refused(self._too_large())
                    parts.append(part)
        except TimeoutError as exc:
            text = f"the request's body did not arrive within {self._config.body_timeout_s:g} s"
            raise _Refused(error(408, "RequestTimeout", text, _CLOSE)) from exc
        except (web.RequestPayloadError, ConnectionError) as exc:
            raise ClientGone from exc
        return b"".join(parts)

    def _too_large(self) -> Answer:
        text = (
            f"The request's body has more than {self._config.max_body_bytes} bytes, which is the"
            " limit here (the Forwarder's `max-body-bytes`)"
        )
        return error(413, "RequestEntityTooLarge", text, _CLOSE)


def _parser_logger() -> logging.Logger:
    """aiohttp logs every malformed request as an error, with a traceback: anybody could fill the
    log. Its answers of 400 are enough."""
    quiet = logging.getLogger(f"{__name__}.parser")
    quiet.setLevel(logging.CRITICAL)
    return quiet


_CLOSE = {"connection": "close"}


class _Connection(RequestHeadDeadline, web.RequestHandler):
    """aiohttp's own, with limits."""

    def __init__(self, server: web.Server, *, pending: PendingConnections, **options: Any):
        super().__init__(server, **options)
        self.pending = pending

    def in_request(self) -> bool:
        return self._current_request is not None or bool(self._messages)


class _Refused(Exception):
    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


async def _continue(request: web.BaseRequest) -> None:
    """aiohttp's low-level server leaves `Expect: 100-continue` to its handler."""
    expects = request.headers.get("expect", "").lower() == "100-continue"
    if expects and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
