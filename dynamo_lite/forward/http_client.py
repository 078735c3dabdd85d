"""The client of one HTTP request to the Forwarder, and what its answer needs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from dynamo_lite.forward.client import ClientGone

#: How long a client has to read the rest of an answer that broke off.
_LINGER_S = 2.0
#: How many bytes may wait for a slow client before reading its answer pauses.
_FULL_BYTES = 64 << 10


class HttpClient:
    """The `Client` of one HTTP request. idle_s: a client that makes no room for so long is
    disconnected, because the engine's leg is open meanwhile."""

    def __init__(self, request: web.BaseRequest, idle_s: float):
        self.started = False
        self._idle_s = idle_s
        self.response: web.StreamResponse | None = None
        self._request = request
        self._chunked = False

    async def start(self, status: int, headers: Mapping[str, str] | CIMultiDict[str]) -> None:
        response = web.StreamResponse(status=status)
        for name, value in headers.items():
            response.headers.add(name, value)
        if "content-length" not in headers:
            no_body = status in (204, 304) or self._request.method == "HEAD"
            if not no_body and self._request.version >= HttpVersion11:
                response.enable_chunked_encoding()
                self._chunked = True
        if headers.get("connection") == "close":
            response.force_close()
        self.response, self.started = response, True
        try:
            await response.prepare(self._request)
        except ConnectionError as exc:
            raise ClientGone from exc

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        if not data:
            return
        async with self._waiting():
            await self.response.write(data)

    def push(self, data: bytes) -> bool:
        """Writes directly to the socket. aiohttp's own path would be the largest part of a
        token's cost."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() < _FULL_BYTES

    async def drained(self) -> None:
        async with self._waiting():
            await self._request.writer.drain()

    async def finish(self) -> None:
        assert self.response is not None
        async with self._waiting():
            await self.response.write_eof()

    @contextlib.asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._idle_s):
                yield
        except (ConnectionError, TimeoutError) as exc:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from exc

    def abort(self) -> None:
        transport, response = self._request.transport, self.response
        if transport is None:
            return
        if self._chunked or (response is not None and "content-length" in response.headers):
            # Without the answer's end it is incomplete: the client still reads what was written.
            transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)
        else:
            transport.abort()
