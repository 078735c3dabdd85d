"""A light HTTP client for streamed answers: what it costs is not what is measured."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_ANSWER_S = 60.0
_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """first_s: from sending to the first event; events: all but the closing one."""

    first_s: float
    total_s: float
    events: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event["choices"])


class Connection:
    """One kept-alive connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def stream(self, path: str, body: dict[str, Any]) -> Answer:
        """Posts `body` with streaming.

        Raises RuntimeError for any answer but 200 and for a broken one, TimeoutError after a
        minute.
        """
        payload = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        async with asyncio.timeout(_ANSWER_S):
            started = time.perf_counter()
            self._writer.write(head.encode() + payload)
            status = await self._reader.readuntil(b"\r\n\r\n")
            if not status.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"answered {status.splitlines()[0].decode()}")
            data = await self._reader.readuntil(b"data: ")
            first = time.perf_counter()
            while not data.endswith(_END):
                part = await self._reader.read(1 << 16)
                if not part:
                    raise RuntimeError("the connection was closed in the middle of an answer")
                data += part
            return Answer(first - started, time.perf_counter() - started, _events(data))


def _events(chunked: bytes) -> list[dict[str, Any]]:
    """Each event is one line, and no chunk boundary falls into a line."""
    lines = chunked.split(b"\r\n")
    data = [line.strip()[6:] for part in lines for line in part.split(b"\n") if b"data: " in line]
    return [json.loads(line) for line in data if line != b"[DONE]"]


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def complete(port: int, prompt: list[int], tokens: int, model: str = "tiny") -> Answer:
    """The completion of a prompt of token ids by exactly `tokens` tokens, on a connection of its
    own. Raises as `Connection.stream`."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with connect(port) as connection:
        return await connection.stream("/v1/completions", {**body, "ignore_eos": True})
