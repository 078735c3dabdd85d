"""An ASGI app that passes a request on to an HTTP server on this host.

The Processor uses it: its requests are few, have one body each and are not streamed.
"""

import asyncio
from http import HTTPStatus

import httptools
from starlette.types import Message, Receive, Scope, Send

from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.runtime.tasks import end_tasks

_HEAD_BYTES = 64 << 10


class _Answer:
    """Collects an answer; the callbacks are those of httptools."""

    def __init__(self) -> None:
        self.status = 0
        self.body: list[bytes] = []
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises Unavailable if it is not HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise Unavailable(f"the HTTP server's answer is malformed: {exc}") from exc

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class HttpRelay:
    """host, port: of the server."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "http.request":
            return
        asked = asyncio.create_task(self._ask(scope, message.get("body", b"")), name="relay")
        gone = asyncio.create_task(_wait_for_disconnect(receive), name="relay disconnect")
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                status, body = asked.result()
                await send({"type": "http.response.start", "status": status, "headers": []})
                await send({"type": "http.response.body", "body": body})
        finally:
            await end_tasks(asked, gone)

    async def _ask(self, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """Raises Unavailable, OSError. A cancel closes the connection, which aborts the request."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(_head(scope, len(body)) + body)
            await writer.drain()
            answer = _Answer()
            while not answer.complete:
                data = await reader.read(_HEAD_BYTES)
                if not data:
                    raise Unavailable("the HTTP server closed the connection before its answer")
                answer.feed(data)
            return answer.status or HTTPStatus.BAD_GATEWAY, b"".join(answer.body)
        finally:
            writer.close()


def _head(scope: Scope, length: int) -> bytes:
    fields = [*scope["headers"], (b"content-length", b"%d" % length), (b"connection", b"close")]
    lines = [b"POST %s HTTP/1.1" % scope["path"].encode(), *(b"%s: %s" % pair for pair in fields)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _wait_for_disconnect(receive: Receive) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message
