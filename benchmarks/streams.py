"""Streamed requests from a client that parses no event: N at a time, or at given times."""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_ANSWER_S = 60.0
#: Of a chunked body; no header ends so.
_END = b"\r\n0\r\n\r\n"
#: Of an event with text. Some servers send one without text before the first token.
_TEXT = re.compile(rb'"(?:text|content)": ?"[^"]')
_ERROR = b'data: {"error'


@dataclass
class Streamed:
    """What a load has seen. first_s: from sending to the first event with text, for each answer."""

    first_s: list[float] = field(default_factory=list[float])
    events: int = 0
    seconds: float = 0.0


@dataclass
class Offered:
    """What a load at given times has seen.

    seen: as above, but `first_s` counts from each request's time, whenever it was sent.
    ends_s: when answers ended, in `time.perf_counter`; failures: why the other requests failed.
    """

    seen: Streamed = field(default_factory=Streamed)
    ends_s: list[float] = field(default_factory=list[float])
    failures: list[str] = field(default_factory=list[str])


async def stream_load(
    port: int, path: str, body: dict[str, Any], *, requests: int, concurrency: int, spread_s: float
) -> Streamed:
    """Sends all requests, `concurrency` at a time; the first ones spread over `spread_s`, so that
    not all streams begin and end together.

    Raises RuntimeError for any answer but 200, and when a connection is lost.
    """
    request = _request(path, body)
    seen, left = Streamed(), iter(range(requests))
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            delay_s = spread_s * number / concurrency
            group.create_task(_one_by_one(port, request, left, seen, delay_s))
    seen.seconds = time.monotonic() - began
    return seen


async def offer_load(
    port: int, path: str, body: dict[str, Any], times_s: Sequence[float]
) -> Offered:
    """Sends a request at each of these times, in seconds from now and ascending, whether or not
    those before are answered; returns when all have ended.

    Each comes on a connection of its own, as from a client of its own: where several processes
    share a port, the kernel gives them connections, not requests.
    """
    request = _request(path, body)
    offered = Offered()
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for time_s in times_s:
            due = began + time_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(_by_itself(port, request, offered, due))
    offered.seen.seconds = time.perf_counter() - began
    return offered


def _request(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def _by_itself(port: int, request: bytes, offered: Offered, due: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_ANSWER_S):
            transport, stream = await loop.create_connection(
                lambda: _Stream(offered.seen), "127.0.0.1", port
            )
            try:
                await stream.ask(transport, request, since=due)
            finally:
                transport.close()
    except TimeoutError:
        offered.failures.append(f"no answer within {_ANSWER_S:g} s")
    except (RuntimeError, OSError) as exc:
        offered.failures.append(str(exc))
    else:
        offered.ends_s.append(time.perf_counter())


async def _one_by_one(
    port: int, request: bytes, left: Iterator[int], seen: Streamed, delay_s: float
) -> None:
    await asyncio.sleep(delay_s)
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: _Stream(seen), "127.0.0.1", port)
    try:
        for _ in left:
            async with asyncio.timeout(_ANSWER_S):
                await stream.ask(transport, request, since=time.perf_counter())
    finally:
        transport.close()


class _Stream(asyncio.Protocol):
    """One connection, one answer at a time."""

    def __init__(self, seen: Streamed):
        self._seen = seen
        self._ended: asyncio.Future[None] | None = None

    async def ask(self, transport: asyncio.WriteTransport, request: bytes, since: float) -> None:
        """since: the time, of `time.perf_counter`, from which the first text is counted.

        Raises RuntimeError for an answer that fails, or has no text.
        """
        self._ended = asyncio.get_running_loop().create_future()
        self._head, self._last, self._has_text = b"", b"", False
        self._since = since
        transport.write(request)
        await self._ended

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._last = (self._last + data)[-len(_END) :]
        ends = self._last == _END
        if not self._has_text:
            self._head = data = self._head + data
            if not data.startswith(b"HTTP/1.1 200"):
                if b"\r\n\r\n" in data:
                    self._fail(f"answered {data.splitlines()[0].decode()}")
                return
            self._has_text = _TEXT.search(data) is not None
            if not self._has_text and not ends:
                return
            if self._has_text:
                self._seen.first_s.append(now - self._since)
        self._seen.events += data.count(b"data: {")
        if _ERROR in data:
            self._fail(f"an answer failed: {data[data.index(_ERROR) :][:200]!r}")
        elif ends and not self._has_text:
            self._fail("an answer without text")
        elif ends and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was closed in the middle of an answer")

    def _fail(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(why))
