"""The worker's TCP listener, and the limit on connections without a Hello."""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dynamo_lite.request_plane.framing import FIRST_FRAME_TIMEOUT_S, STALL_TIMEOUT_S
from dynamo_lite.request_plane.session import Session
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.listening import PendingConnections, TcpServer
from dynamo_lite.runtime.log_limit import LogLimit

if TYPE_CHECKING:
    from dynamo_lite.request_plane.server import GenerateServer

logger = logging.getLogger(__name__)

#: Connections without a Hello, those in their TLS handshake among them. Clients send it at once, so
#: this is far more than all clients that may connect at the same time.
MAX_UNGREETED = 512
#: The component whose processes are clients.
_CLIENT = "Frontend"


class Listener:
    """Accepts connections. Each one becomes a session with its Hello.

    certificates: of this worker, for TLS; clients must be Frontends of its graph.
    """

    def __init__(
        self,
        server: "GenerateServer",
        bind_host: str,
        on_drop: OnDrop,
        certificates: Certificates | None,
    ):
        self._certificates, self.on_drop = certificates, on_drop
        self._make = partial(Session, server, self)
        #: Of all connections: a stranger may open many.
        self.log_limit = LogLimit()
        self._bind_host = bind_host
        self._server: TcpServer | None = None
        self._pending = PendingConnections(MAX_UNGREETED, lambda: on_drop("stream"))
        self._connections: set[Session] = set()
        self._all_closed = asyncio.Event()
        self.address = ""

    async def open(self) -> None:
        """Raises StartupError when it cannot listen on the host."""
        self._server = TcpServer(
            self._bind_host,
            self._make,
            self._pending,
            None if self._certificates is None else self._certificates.server,
            handshake_s=FIRST_FRAME_TIMEOUT_S,
            shutdown_s=STALL_TIMEOUT_S,
            on_failed=self._handshake_failed,
        )
        self.address = advertised_address(self._bind_host, await self._server.start())

    async def close(self) -> None:
        """Waits up to 1 s for connections to send what is queued, then aborts them."""
        try:
            if self._server is not None:
                await self._server.close()
            for connection in list(self._connections):
                connection.close("the worker closed the stream")
            async with asyncio.timeout(1.0):
                while self._connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        except TimeoutError:
            pass
        finally:  # also when this is cancelled
            for connection in list(self._connections):
                connection.abort("the worker closed the stream")

    def opened(self, connection: Session) -> None:
        """Of a certificate that does not fit it is closed."""
        self._connections.add(connection)
        if self._certificates is not None:
            why = self._certificates.refusal(connection.ssl_object, _CLIENT)
            if why:
                self._refused(connection.peer, why)
                connection.abort(why)
                return
        why = f"more than {MAX_UNGREETED} connections without a Hello"
        self._pending.add(connection, connection.peer_host, partial(connection.abort, why))

    def greeted(self, connection: Session) -> None:
        self._pending.discard(connection)

    def closed(self, connection: Session) -> None:
        self._pending.discard(connection)
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def _handshake_failed(self, peer: str, exc: OSError) -> None:
        if self._certificates is not None and (why := self._certificates.explained(exc)):
            self._refused(peer, why)

    def _refused(self, peer: str, why: str) -> None:
        self.on_drop("certificate")
        self.log_limit.log(logger, "stream with %s: the client is refused: %s", peer, why)
