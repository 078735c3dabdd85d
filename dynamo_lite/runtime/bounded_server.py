"""A uvicorn that limits its TLS handshakes."""

import asyncio
import socket
import ssl

import uvicorn

from dynamo_lite.runtime.pending_connections import PendingConnections
from dynamo_lite.runtime.tls_acceptor import HANDSHAKE_S, TlsAcceptor


class BoundedServer(uvicorn.Server):
    """pending: connections in their TLS handshake, and those that its protocols add."""

    def __init__(self, config: uvicorn.Config, pending: PendingConnections):
        super().__init__(config)
        self._pending = pending
        self._acceptors: list[TlsAcceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (context := self.context()) is None:
            await super().startup(sockets=sockets)
            return
        await super().startup(sockets=[])  # everything but the listening
        for sock in sockets or []:
            acceptor = TlsAcceptor(
                sock,
                self._connection,
                lambda: self.context() or context,
                self._pending,
                handshake_s=HANDSHAKE_S,
                backlog=self.config.backlog,
            )
            acceptor.start()
            self._acceptors.append(acceptor)

    def context(self) -> ssl.SSLContext | None:
        """For a new connection; None for plain TCP."""
        return self.config.ssl

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
            server_state=self.server_state,  # pyright: ignore[reportCallIssue]
            app_state=self.lifespan.state,  # pyright: ignore[reportCallIssue]
        )
