"""Requests of the Processor to an HTTP server on this host: few, each with one body."""

import asyncio
from functools import partial

import httptools

from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.serve.services.frontend.processor import HEADERS, Ask

_HEAD_BYTES = 64 << 10


class _Answer:
    """Collects an answer; the callbacks are those of httptools."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises Unavailable if it is not HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise Unavailable(f"the HTTP server's answer is malformed: {exc}") from exc

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


def ask_server(host: str, port: int) -> Ask:
    return partial(_ask, host, port)


async def _ask(host: str, port: int, path: str, body: bytes) -> bytes:
    """Raises Unavailable, OSError. A cancel closes the connection, which aborts the request."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_head(path, len(body)) + body)
        await writer.drain()
        answer = _Answer()
        while not answer.complete:
            data = await reader.read(_HEAD_BYTES)
            if not data:
                raise Unavailable("the HTTP server closed the connection before its answer")
            answer.feed(data)
        return b"".join(answer.body)
    finally:
        writer.close()


def _head(path: str, length: int) -> bytes:
    fields = [*HEADERS, (b"content-length", b"%d" % length), (b"connection", b"close")]
    lines = [b"POST %s HTTP/1.1" % path.encode(), *(b"%s: %s" % pair for pair in fields)]
    return b"\r\n".join(lines) + b"\r\n\r\n"
