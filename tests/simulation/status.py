"""The status server of a simulated process, for what a planner asks: /health."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import msgspec


class SimStatus:
    """Async context manager. health: makes the facts. There are no metrics."""

    def __init__(self, host: str, health: Callable[[], dict[str, Any]]):
        self._host, self._health = host, health
        self._server: asyncio.AbstractServer | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = server = await loop.create_server(
            lambda: _Answers(self._health), self._host, 0
        )
        self.url = f"http://{self._host}:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()


class _Answers(asyncio.Protocol):
    """HTTP/1.0: one request for each connection."""

    def __init__(self, health: Callable[[], dict[str, Any]]):
        self._health = health

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /health "):
            body = msgspec.json.encode(self._health())
            self._transport.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        else:
            self._transport.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
        self._transport.close()
