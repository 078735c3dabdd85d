"""Listening sockets, and a uvicorn that limits its TLS handshakes."""

import asyncio
import socket

import uvicorn

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.pending_connections import PendingConnections
from dynamo_lite.runtime.tls_acceptor import TlsAcceptor

#: Clients of other hosts need two round trips.
HANDSHAKE_S = 10.0


class BoundedServer(uvicorn.Server):
    """pending: connections in their TLS handshake, and those that its protocols add."""

    def __init__(self, config: uvicorn.Config, pending: PendingConnections):
        super().__init__(config)
        self._pending = pending
        self._acceptors: list[TlsAcceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().startup(sockets=sockets)
            return
        await super().startup(sockets=[])  # everything but the listening
        for sock in sockets or []:
            acceptor = TlsAcceptor(
                sock,
                self._connection,
                self.config.ssl,
                self._pending,
                handshake_s=HANDSHAKE_S,
                backlog=self.config.backlog,
            )
            acceptor.start()
            self._acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.stop_accepting()
        await super().shutdown(sockets=sockets)

    async def stop_accepting(self) -> None:
        """With TLS. For who ends it without `shutdown`."""
        for acceptor in self._acceptors:
            await acceptor.close()

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(
            config=self.config,  # pyright: ignore[reportCallIssue]
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


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
    except OSError as exc:
        listener.close()
        raise StartupError(f"cannot listen on {host_port(host, port)}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener
