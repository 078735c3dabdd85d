"""The client's side of one request, as the workflow sees it."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from dynamo_lite.forward.decision_log import RequestNote

#: How long a client has to read the rest of an answer that broke off.
_LINGER_S = 2.0
#: How many bytes may wait for a slow client before reading its answer pauses.
_FULL_BYTES = 64 << 10
#: The beginning of transfer parameters. Inside a JSON string its quotes would be escaped.
_PARAMS = re.compile(rb'"(?:kv|ec)_transfer_params"\s*:\s*\{')
_PARAMS_NAME = b"_transfer_params"
#: Such a beginning is shorter.
_TAIL_BYTES = 64


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str] | CIMultiDict[str] = field(default_factory=CIMultiDict[str])
    body: bytes = b""


class ParamsBlanker:
    """Replaces the content of transfer parameters with spaces in an answer that comes in pieces:
    they name engines' addresses, and a decode engine of a bidirectional transfer returns some.
    The answer's length does not change."""

    def __init__(self) -> None:
        #: The last bytes of the piece before.
        self._tail = b""
        #: Depth of objects inside transfer parameters; 0 outside.
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, data: bytes) -> bytes:
        shown = b""
        while data:
            if self._depth:
                end = self._end(data)
                shown, data = shown + b" " * end, data[end:]
                continue
            text = self._tail + data
            found = _PARAMS.search(text) if _PARAMS_NAME in text else None
            if found is None:
                self._tail = text[-_TAIL_BYTES:]
                return shown + data
            begin = found.end() - len(self._tail)
            shown, data = shown + data[:begin], data[begin:]
            self._tail, self._depth = b"", 1
        return shown

    def _end(self, data: bytes) -> int:
        """How many of these bytes are inside."""
        for at, byte in enumerate(data):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = byte == ord("\\"), byte != ord('"')
            elif byte == ord('"'):
                self._in_string = True
            elif byte in b"{}":
                self._depth += 1 if byte == ord("{") else -1
                if not self._depth:
                    return at
        return len(data)


class Client:
    """Takes one answer. All methods raise ClientGone. idle_s: a client that makes no room for so
    long is disconnected, because the engine's leg is open meanwhile."""

    def __init__(self, request: web.BaseRequest, idle_s: float):
        #: Whether the head of the answer was sent. After that no retry is possible.
        self.started = False
        #: Of the request that is answered, once it is known to be one to generate.
        self.note: RequestNote | None = None
        self._idle_s = idle_s
        self.response: web.StreamResponse | None = None
        self._request = request
        self._chunked = False
        self._params = ParamsBlanker()

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
        if self.note is not None:
            self.note.message.status = status
        try:
            await response.prepare(self._request)
        except ConnectionError as exc:
            raise ClientGone from exc

    async def write(self, data: bytes) -> None:
        """Returns when the client has room for more."""
        assert self.response is not None
        if not data:
            return
        data = self._params.feed(data)
        if self.note is not None:
            self.note.wrote(data)
        async with self._waiting():
            await self.response.write(data)

    def push(self, data: bytes) -> bool:
        """As `write` after another `write`, but at once. Returns whether the client has room for
        more; if not, the caller awaits `drained`.

        Writes directly to the socket: aiohttp's own path would be the largest part of a token's
        cost.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        data = self._params.feed(data)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() < _FULL_BYTES

    async def drained(self) -> None:
        async with self._waiting():
            await self._request.writer.drain()

    async def finish(self) -> None:
        assert self.response is not None
        async with self._waiting():
            await self.response.write_eof()

    async def send(self, answer: Answer) -> None:
        await self.start(answer.status, answer.headers)
        if self._request.method != "HEAD":
            await self.write(answer.body)
        await self.finish()

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
        """Closes the connection without the answer's end, so that the client sees that the answer
        is incomplete. Bytes that were written before are still delivered if the client can
        tell."""
        transport, response = self._request.transport, self.response
        if transport is None:
            return
        if self._chunked or (response is not None and "content-length" in response.headers):
            transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)
        else:
            transport.abort()


def error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    """An error answer in the form of vLLM's own errors."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    own = {"content-type": "application/json", **(headers or {})}
    return Answer(status, own, msgspec.json.encode(body))
