"""Streamed requests over kept-alive connections, from a client that parses no event."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_ANSWER_S = 60.0
_END = b"0\r\n\r\n"


@dataclass
class Streamed:
    """What a load has seen. first_s: from sending to the first event, for each answer."""

    first_s: list[float] = field(default_factory=list[float])
    events: int = 0
    seconds: float = 0.0


async def stream_load(
    port: int, path: str, body: dict[str, Any], *, requests: int, concurrency: int, spread_s: float
) -> Streamed:
    """Sends all requests, `concurrency` at a time; the first ones spread over `spread_s`, so that
    not all streams begin and end together.

    Raises RuntimeError for any answer but 200, and when a connection is lost.
    """
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    seen, left = Streamed(), iter(range(requests))
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            delay_s = spread_s * number / concurrency
            group.create_task(_one_by_one(port, head.encode() + payload, left, seen, delay_s))
    seen.seconds = time.monotonic() - began
    return seen


async def _one_by_one(
    port: int, request: bytes, left: Iterator[int], seen: Streamed, delay_s: float
) -> None:
    await asyncio.sleep(delay_s)
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: _Stream(seen), "127.0.0.1", port)
    try:
        for _ in left:
            async with asyncio.timeout(_ANSWER_S):
                await stream.ask(transport, request)
    finally:
        transport.close()


class _Stream(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, seen: Streamed):
        self._seen = seen
        self._ended: asyncio.Future[None] | None = None

    async def ask(self, transport: asyncio.WriteTransport, request: bytes) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._head, self._last, self._first = b"", b"", True
        self._sent = time.perf_counter()
        transport.write(request)
        await self._ended

    def data_received(self, data: bytes) -> None:
        if self._first:
            self._head = data = self._head + data
            if b"data: " not in data:
                if b"\r\n\r\n" in data and not data.startswith(b"HTTP/1.1 200"):
                    self._fail(f"answered {data.splitlines()[0].decode()}")
                return
            self._first = False
            self._seen.first_s.append(time.perf_counter() - self._sent)
        self._seen.events += data.count(b"data: {")
        self._last = (self._last + data)[-len(_END) :]
        if self._last == _END and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed in the middle of an answer")

    def _fail(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(why))
