"""The HTTP listener of the Frontend: uvicorn on a socket that is bound early, and probes.

Binding comes before the model is read, so that a taken port is found at once.
Signals are the process host's, not uvicorn's.
"""

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.readiness import Probes

_BACKLOG = 2048

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


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://{host_port(host, port)}"


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


class HttpServer(uvicorn.Server):
    """`start` returns when connections are accepted; `stop` is idempotent."""

    def __init__(self, app: Any, sock: socket.socket, *, access_log: bool, keep_alive_s: int):
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="on",
                # The process has configured logging already.
                log_config=None,
                access_log=access_log,
                timeout_keep_alive=keep_alive_s,
                backlog=_BACKLOG,
            )
        )
        self._sock = sock
        self._ticks: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises StartupError when the socket cannot listen."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        try:
            await self.startup(sockets=[self._sock])
        except OSError as exc:
            await self.lifespan.shutdown()
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
