"""The worker's TCP listener. It turns connections into sessions."""

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.generate import (
    Accepted,
    Cancel,
    Hello,
    RequestRefused,
    Submit,
    SubmitReply,
    Welcome,
    decode_client_frame,
)
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.request_plane.framing import (
    FIRST_FRAME_TIMEOUT_S,
    STALL_TIMEOUT_S,
    FrameConnection,
    frame,
)
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import PendingConnections, TcpServer
from dynamo_lite.runtime.log_limit import LogLimit

if TYPE_CHECKING:
    from dynamo_lite.request_plane.server import GenerateServer
    from dynamo_lite.request_plane.session import Session

logger = logging.getLogger(__name__)

#: Connections without a Hello, those in their TLS handshake among them. Clients send it at once, so
#: this is far more than all clients that may connect at the same time.
MAX_UNGREETED = 512
#: Of a Hello, which anybody may send.
MAX_HELLO_BYTES = 1 << 16
#: The component whose processes are clients.
_CLIENT = "Frontend"


class Listener:
    """Accepts connections. Each one becomes a session with its Hello.

    certificates: of this worker, for TLS; clients must be Frontends of its graph.
    """

    def __init__(
        self,
        sessions: "GenerateServer",
        bind_host: str,
        on_drop: OnDrop = uncounted,
        certificates: Certificates | None = None,
    ):
        self._certificates, self._sessions = certificates, sessions
        self._on_drop = on_drop
        #: Of all connections: a stranger may open many.
        self._log_limit = LogLimit()
        self._bind_host = bind_host
        self._server: TcpServer | None = None
        self._pending = PendingConnections(MAX_UNGREETED, lambda: on_drop("stream"))
        self._connections: dict[FrameConnection, Session | None] = {}
        self._all_closed = asyncio.Event()
        self.address = ""

    async def open(self) -> None:
        """Raises StartupError when it cannot listen on the host."""
        self._server = TcpServer(
            self._bind_host,
            self._connection,
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

    def _connection(self) -> FrameConnection:
        return FrameConnection(
            self,
            first_max_bytes=MAX_HELLO_BYTES,
            on_open=self._opened,
            on_drop=self._on_drop,
            log_limit=self._log_limit,
        )

    def _opened(self, connection: FrameConnection) -> None:
        self._connections[connection] = None
        if self._certificates is not None:
            why = self._certificates.refusal(connection.ssl_object, _CLIENT)
            if why:
                self._refused(connection.peer, why)
                connection.abort(why)
                return
        why = f"more than {MAX_UNGREETED} connections without a Hello"
        self._pending.add(connection, connection.peer_host, partial(connection.abort, why))

    def _handshake_failed(self, peer: str, exc: OSError) -> None:
        if self._certificates is not None and (why := self._certificates.explained(exc)):
            self._refused(peer, why)

    def _refused(self, peer: str, why: str) -> None:
        self._on_drop("certificate")
        self._log_limit.log(logger, "stream with %s: the client is refused: %s", peer, why)

    # FrameReceiver

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        match decode_client_frame(payload):
            case Hello(client_id=client_id, wire_version=version):
                if version != WIRE_VERSION:
                    raise ProtocolError(unsupported(version))
                if self._connections.get(connection) is not None:
                    raise ProtocolError("a second Hello on one connection")
                self._connections[connection] = self._sessions.open_session(client_id, connection)
                self._pending.discard(connection)
                connection.send(frame(encode(Welcome())))
            case Submit(request_id=request_id, request=request):
                reply = partial(_reply, connection, request_id)
                self._sessions.submit(self._greeted(connection), request_id, request, reply)
            case Cancel(request_ids=request_ids):
                self._sessions.cancel(self._greeted(connection), request_ids)

    def _greeted(self, connection: FrameConnection) -> "Session":
        """Returns the connection's session. Raises ProtocolError if there was no Hello yet."""
        session = self._connections.get(connection)
        if session is None:
            raise ProtocolError("a frame before the Hello")
        return session

    def connection_closed(self, connection: FrameConnection, why: str) -> None:
        self._pending.discard(connection)
        session = self._connections.pop(connection, None)
        if session is not None:
            logger.info("stream of client %s disconnected: %s", session.client_id, why)
            self._sessions.close_session(session)
        if not self._connections:
            self._all_closed.set()


def _reply(connection: FrameConnection, request_id: str, reply: Accepted | RequestRefused) -> None:
    connection.send(frame(encode(SubmitReply(request_id=request_id, reply=reply))))
