"""aiohttp's low-level HTTP server, with limits on connections without a request's head.

Its parser is in C, and no web framework lies between a socket and the handler. A handler is
cancelled when its client disconnects.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

from aiohttp import web

from dynamo_lite.runtime.listening import TcpServer
from dynamo_lite.runtime.pending import PendingConnections
from dynamo_lite.runtime.request_head import RequestHeadDeadline, most_pending

logger = logging.getLogger(__name__)

_BACKLOG = 2048
#: For aiohttp a timeout of 0 means no limit.
_NO_GRACE_S = 0.001

#: aiohttp logs every malformed request as an error, with a traceback: anybody could fill the log.
#: Its answers of 400 are enough.
_parser_logger = logging.getLogger(f"{__name__}.parser")
_parser_logger.setLevel(logging.CRITICAL)


class WebServer:
    """Async context manager, in which connections are accepted. `stop` is idempotent.

    sock: bound; it is closed at the end. context: for each new connection; None: plain HTTP.
    on_drop: called for a connection that is closed because too many have no request, and for a
    request that is no HTTP. options: of aiohttp's RequestHandler.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        sock: socket.socket,
        context: Callable[[], ssl.SSLContext] | None,
        *,
        on_drop: Callable[[], None],
        **options: Any,
    ):
        self._web = web.Server(handler, handler_cancellation=True)
        pending = PendingConnections(most_pending(), on_drop)
        make = partial(
            _Connection,
            self._web,
            pending,
            on_drop,
            loop=asyncio.get_running_loop(),
            access_log=None,  # pyright: ignore[reportArgumentType]
            logger=_parser_logger,
            auto_decompress=False,
            **options,
        )
        self._server = TcpServer(sock, make, pending, context, backlog=_BACKLOG)
        self._stopping = False

    async def __aenter__(self) -> Self:
        """Raises StartupError when the socket cannot listen."""
        try:
            await self._server.start()
        except BaseException:
            await self.stop(0.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits up to `grace_s` for open answers, then disconnects the rest."""
        await self._server.close()
        if not self._stopping:
            self._stopping = True
            self._web.pre_shutdown()
        # Runs even if an earlier call was cancelled and has left connections open. aiohttp waits
        # twice for its timeout: for open answers, and when it has cancelled them.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._web.shutdown(None)
        await self._web.shutdown(_NO_GRACE_S)


class _Connection(RequestHeadDeadline, web.RequestHandler):
    """aiohttp's own, with limits."""

    def __init__(
        self,
        server: web.Server,
        pending: PendingConnections,
        on_drop: Callable[[], None],
        **options: Any,
    ):
        super().__init__(server, **options)
        self.pending, self._on_drop = pending, on_drop

    def in_request(self) -> bool:
        return self._current_request is not None or bool(self._messages)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            self._on_drop()
        else:
            logger.error("a request to %s failed", request.path, exc_info=exc)
        return super().handle_error(request, status, exc, message)
