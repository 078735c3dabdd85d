"""The worker's connections: who is accepted, and how all of them end."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from dynamo_lite.request_plane.framing import (
    FIRST_FRAME_TIMEOUT_S,
    STALL_TIMEOUT_S,
    FrameConnection,
)
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.listening import TcpServer
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.pending import PendingConnections

logger = logging.getLogger(__name__)

#: Connections without a Hello, those in their TLS handshake among them. Clients send it at once, so
#: this is far more than all clients that may connect at the same time.
MAX_UNGREETED = 512
#: The component whose processes are clients.
_CLIENT = "Frontend"
#: How long closing waits for connections to send what is queued.
_FLUSH_TIMEOUT_S = 1.0


class SessionListener:
    """make: returns the protocol of a connection, which calls `opened` and `greeted`.

    on_drop, certificates: see `GenerateServer`.
    """

    def __init__(
        self,
        make: Callable[[], FrameConnection],
        bind_host: str,
        certificates: Certificates | None,
        on_drop: OnDrop,
    ):
        self._bind_host, self._certificates, self._on_drop = bind_host, certificates, on_drop
        #: Of all connections: a stranger may open many.
        self.log_limit = LogLimit()
        #: All open connections, with a Hello or without.
        self.sessions: set[FrameConnection] = set()
        self._pending = PendingConnections(MAX_UNGREETED, lambda: on_drop("stream"))
        self._server = TcpServer(
            bind_host,
            make,
            self._pending,
            None if certificates is None else certificates.server,
            handshake_s=FIRST_FRAME_TIMEOUT_S,
            shutdown_s=STALL_TIMEOUT_S,
            on_failed=self._handshake_failed,
        )

    async def start(self) -> str:
        """The address for the endpoint's record. Raises StartupError when it cannot listen."""
        return advertised_address(self._bind_host, await self._server.start())

    async def close(self, why: str) -> None:
        """Accepts no more, and ends all connections when they have sent what is queued."""
        try:
            await self._server.close()
            for session in list(self.sessions):
                session.close(why)
            if closed := [session.closed for session in self.sessions]:
                await asyncio.wait(closed, timeout=_FLUSH_TIMEOUT_S)
        finally:  # also when this is cancelled
            for session in list(self.sessions):
                session.abort(why)

    def opened(self, session: FrameConnection) -> None:
        """The connection is made, without a Hello. With a certificate that does not fit, it is
        closed."""
        self.sessions.add(session)
        session.closed.add_done_callback(lambda _: self._lost(session))
        if self._certificates is not None:
            why = self._certificates.refusal(session.ssl_object, _CLIENT)
            if why:
                self._refuse_client(session.peer, why)
                session.abort(why)
                return
        why = f"more than {MAX_UNGREETED} connections without a Hello"
        self._pending.add(session, session.peer_host, partial(session.abort, why))

    def greeted(self, session: FrameConnection) -> None:
        """The client has sent its Hello."""
        self._pending.discard(session)

    def _lost(self, session: FrameConnection) -> None:
        self._pending.discard(session)
        self.sessions.discard(session)

    def _handshake_failed(self, peer: str, exc: OSError) -> None:
        if self._certificates is not None and (why := self._certificates.explained(exc)):
            self._refuse_client(peer, why)

    def _refuse_client(self, peer: str, why: str) -> None:
        self._on_drop("certificate")
        self.log_limit.log(logger, "stream with %s: the client is refused: %s", peer, why)
