"""A TCP server with TLS that limits the number of connections in their handshakes.

`loop.create_server` tells nothing of a connection before its handshake has succeeded, so a stranger
can hold as many as the process has file descriptors.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.pending_connections import PendingConnections
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Of an HTTP server: clients of other hosts need two round trips.
HANDSHAKE_S = 10.0
#: Pause when no connection can be accepted, for want of file descriptors.
_ACCEPT_AGAIN_S = 1.0


class TlsAcceptor:
    """sock: bound; it is closed at the end. make: returns the protocol of a connection. That one
    adds itself to `pending` again when it is connected, and removes itself when it is in use or
    lost. context: called for each connection. handshake_s, shutdown_s: limits on a handshake, and
    on the end of TLS. on_failed: called with the client's address when a handshake has failed.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        pending: PendingConnections,
        *,
        handshake_s: float,
        shutdown_s: float | None = None,
        backlog: int = 100,
        on_failed: Callable[[str, OSError], object] = lambda _peer, _exc: None,
    ):
        self._sock, self._make, self._context, self._pending = sock, make, context, pending
        self._handshake_s, self._shutdown_s = handshake_s, shutdown_s
        self._backlog, self._on_failed = backlog, on_failed
        self._log_limit = LogLimit()
        self._tasks = OwnedTasks()

    def start(self) -> None:
        """Raises OSError when the socket cannot listen."""
        self._sock.listen(self._backlog)
        self._sock.setblocking(False)
        self._tasks.start(self._accept(), name="accept TLS connections")

    async def close(self) -> None:
        """Accepts no more. Handshakes under way are ended, established connections are not.
        Idempotent."""
        try:
            await self._tasks.end()
        finally:
            self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._sock)
            except OSError as exc:
                if self._log_limit.allow() is not None:
                    logger.warning("cannot accept connections, trying again: %s", exc)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            protocol = self._make()
            task = self._tasks.start(
                self._handshake(connection, peer[0], protocol), name="TLS handshake"
            )
            task.add_done_callback(partial(self._ended, connection, protocol))
            self._pending.add(protocol, peer[0], task.cancel)

    async def _handshake(
        self, connection: socket.socket, peer: str, protocol: asyncio.Protocol
    ) -> bool:
        """Whether it has succeeded."""
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context(),
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
