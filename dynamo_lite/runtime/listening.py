"""Listening sockets, with TLS or without."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.pending import PendingConnections
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Limit on a TLS handshake with an HTTP server: clients of other hosts need two round trips.
HANDSHAKE_S = 10.0
#: Pause when no connection can be accepted, for want of file descriptors.
_ACCEPT_AGAIN_S = 1.0


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound, not yet listening TCP socket. Raises StartupError naming the address.

    shared: other processes of this user may listen on the same port (SO_REUSEPORT); the kernel
    gives each new connection to one of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as exc:
        listener.close()
        why = exc.strerror if isinstance(exc, OSError) else "no such port"
        raise StartupError(f"cannot listen on {host_port(host, port)}: {why}") from exc
    listener.setblocking(False)
    return listener


class TcpServer:
    """Accepts connections, with TLS or without.

    `loop.create_server` tells nothing of a connection before its TLS handshake has succeeded, so a
    stranger could hold as many as the process has file descriptors. Here `pending` has them.

    where: a bound socket, which is closed at the end; or a host, where it listens on a free port.
    make: returns the protocol of a connection. That one adds itself to `pending` (again) when it is
    connected, and removes itself when it is in use or lost. context: called for each connection;
    None: plain TCP. handshake_s, shutdown_s: limits on a handshake, and on the end of TLS.
    on_failed: called with the client's address when a handshake has failed.
    """

    def __init__(
        self,
        where: socket.socket | str,
        make: Callable[[], asyncio.Protocol],
        pending: PendingConnections,
        context: Callable[[], ssl.SSLContext] | None,
        *,
        handshake_s: float = HANDSHAKE_S,
        shutdown_s: float | None = None,
        backlog: int = 100,
        on_failed: Callable[[str, OSError], object] = lambda _peer, _exc: None,
    ):
        self._where, self._make, self._pending, self._context = where, make, pending, context
        self._handshake_s, self._shutdown_s = handshake_s, shutdown_s
        self._backlog, self._on_failed = backlog, on_failed
        self._log_limit = LogLimit()
        self._tasks = OwnedTasks()
        self._plain: asyncio.Server | None = None

    async def start(self) -> int:
        """The port on which it listens. Raises StartupError when it cannot."""
        where = self._where
        try:
            if self._context is None:
                return await self._start_plain()
            self._where = sock = bind(where, 0) if isinstance(where, str) else where
            sock.listen(self._backlog)
            sock.setblocking(False)
            self._tasks.start(self._accept(sock, self._context), name="accept TLS connections")
            return sock.getsockname()[1]
        except OSError as exc:
            at = where if isinstance(where, str) else host_port(*where.getsockname()[:2])
            raise StartupError(f"cannot listen on {at}: {exc.strerror}") from exc

    async def _start_plain(self) -> int:
        loop, where = asyncio.get_running_loop(), self._where
        place: dict[str, Any] = (
            {"host": where, "port": 0} if isinstance(where, str) else {"sock": where}
        )
        # Known before it listens, so that a cancelled start leaves nothing open.
        self._plain = await loop.create_server(
            self._make, backlog=self._backlog, start_serving=False, **place
        )
        await self._plain.start_serving()
        return self._plain.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Accepts no more. Handshakes under way are ended, established connections are not.
        Idempotent."""
        if self._plain is not None:
            self._plain.close()
        try:
            await self._tasks.end()
        finally:
            if not isinstance(self._where, str):
                self._where.close()

    async def _accept(self, sock: socket.socket, context: Callable[[], ssl.SSLContext]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(sock)
            except OSError as exc:
                self._log_limit.log(logger, "cannot accept connections, trying again: %s", exc)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            protocol = self._make()
            task = self._tasks.start(
                self._handshake(connection, peer[0], protocol, context), name="TLS handshake"
            )
            task.add_done_callback(partial(self._ended, connection, protocol))
            self._pending.add(protocol, peer[0], task.cancel)
            # A burst that is accepted at once would leave no turn to those that are cancelled.
            await asyncio.sleep(0)

    async def _handshake(
        self,
        connection: socket.socket,
        peer: str,
        protocol: asyncio.Protocol,
        context: Callable[[], ssl.SSLContext],
    ) -> bool:
        """Whether it has succeeded."""
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=context(),
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._shutdown_s,
            )
        except OSError as exc:  # also what the ssl module raises
            logger.debug("a TLS handshake failed: %s", exc)
            self._on_failed(peer, exc)
            return False
        return True

    def _ended(
        self, connection: socket.socket, protocol: asyncio.Protocol, task: asyncio.Task[bool]
    ) -> None:
        """A callback of the task, since one that is cancelled before it runs executes nothing."""
        if task.cancelled() or task.exception() is not None or not task.result():
            self._pending.discard(protocol)
            connection.close()
