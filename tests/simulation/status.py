"""The status server of a simulated process, for what a planner asks: /health and /metrics."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_lite.runtime.overview.compose import WANTED


class SimStatus:
    """Async context manager. health: makes the facts. Of the metrics there are those that are
    read."""

    def __init__(
        self, host: str, health: Callable[[], dict[str, Any]], registry: CollectorRegistry
    ):
        self._host, self._health, self._registry = host, health, registry
        self._server: asyncio.AbstractServer | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = server = await loop.create_server(
            lambda: _Answers(self._answer), self._host, 0
        )
        self.url = f"http://{self._host}:{server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def _answer(self, path: bytes) -> bytes | None:
        if path == b"/health":
            return msgspec.json.encode(self._health())
        if path != b"/metrics":
            return None
        return generate_latest(self._registry.restricted_registry(WANTED))


class _Answers(asyncio.Protocol):
    """HTTP/1.0: one request for each connection. answer: the body for a path; None: not found."""

    def __init__(self, answer: Callable[[bytes], bytes | None]):
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        body = self._answer(data.split(b" ", 2)[1])
        if body is not None:
            self._transport.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        else:
            self._transport.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
        self._transport.close()
