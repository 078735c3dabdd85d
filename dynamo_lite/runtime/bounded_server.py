"""A uvicorn that limits its connections without a request's head."""

import asyncio
import socket
from typing import Any

import uvicorn

from dynamo_lite.runtime.listening import PendingConnections, TcpServer
from dynamo_lite.runtime.request_head import RequestHeadDeadline


class UvicornHeadDeadline(RequestHeadDeadline):
    """In front of either of uvicorn's protocols."""

    #: Request and response that are under way, or the last ones.
    cycle: Any

    def in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class BoundedServer(uvicorn.Server):
    """pending: connections in their TLS handshake, and those that its protocols add."""

    def __init__(self, config: uvicorn.Config, pending: PendingConnections):
        super().__init__(config)
        self._pending = pending
        self._listening: list[TcpServer] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # everything but the listening
        context, backlog = self.config.ssl, self.config.backlog
        tls = None if context is None else lambda: context
        for sock in sockets or []:
            server = TcpServer(sock, self._connection, self._pending, tls, backlog=backlog)
            self._listening.append(server)
            await server.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self._listening:
            await server.close()
        await super().shutdown(sockets=sockets)

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(
            config=self.config,  # pyright: ignore[reportCallIssue]
            server_state=self.server_state,  # pyright: ignore[reportCallIssue]
            app_state=self.lifespan.state,  # pyright: ignore[reportCallIssue]
        )
