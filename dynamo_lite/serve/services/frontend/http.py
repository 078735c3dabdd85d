"""The Frontend's HTTP server: uvicorn, with TLS, on a socket that is bound early.

The socket is bound before the model is loaded, so that a port in use is reported at once. The
process host handles signals, not uvicorn.
"""

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import uvicorn

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import local_url
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import TcpServer
from dynamo_lite.runtime.pending import PendingConnections
from dynamo_lite.runtime.request_head import most_pending
from dynamo_lite.serve.services.frontend.http_entry import limited_protocol
from dynamo_lite.vllm.access_log import QuietPaths
from dynamo_lite.vllm.http_options import HttpOptions

_access = logging.getLogger("uvicorn.access")

_BACKLOG = 2048

#: How long the app may take to notice that its clients are disconnected.
_DISCONNECT_S = 3.0


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The server's URL for a client on this host."""
    return local_url(*sock.getsockname()[:2], tls=tls)


class HttpServer(uvicorn.Server):
    """`start` returns when connections are accepted; `stop` is idempotent.

    on_drop: called with "http" for a connection that is closed because too many have no request.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        options: HttpOptions | None = None,
        *,
        on_drop: OnDrop = uncounted,
    ):
        self._options = options or HttpOptions()
        self._pending = PendingConnections(most_pending(), lambda: on_drop("http"))
        self._protocol = limited_protocol(self._options, self._pending)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._protocol,
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
        self._ticks: asyncio.Task[None] | None = None
        self._quiet = QuietPaths(self._options.quiet_paths)

    async def start(self) -> None:
        """Raises StartupError when the socket cannot listen, TLS cannot be set up, or the app's own
        startup fails."""
        self.config.load()
        tls = None if self._options.tls is None else self._options.tls.contexts()
        self.lifespan = self.config.lifespan_class(self.config)
        make = partial(self._protocol, self.config, self.server_state, self.lifespan.state)
        self._listening = TcpServer(self._sock, make, self._pending, tls, backlog=_BACKLOG)
        try:
            await self.startup(sockets=[])  # everything but the listening
            await self._listening.start()
        except StartupError:
            await self.lifespan.shutdown()
            raise
        except SystemExit as exc:
            # uvicorn would end the process at once: the app's own startup has failed.
            raise StartupError("the HTTP app has failed to start; the log says why") from exc
        self._ticks = asyncio.create_task(self.main_loop(), name="http-ticks")
        _access.addFilter(self._quiet)

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits up to `grace_s` for open responses, then disconnects the rest.

        A disconnect, not a cancellation, makes vLLM's app abort a request at its worker.
        """
        ticks, self._ticks = self._ticks, None
        if ticks is None:
            return
        self.should_exit = True
        stopping = asyncio.create_task(self.shutdown(sockets=[self._sock]), name="http-stop")
        # Nested: a cancel in one step must not skip the next one.
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
        await self._listening.close()
        await super().shutdown(sockets=sockets)
        _access.removeFilter(self._quiet)
