"""A connection to an engine, and the answers that come on it. The parser is llhttp, through
httptools.

Arriving bytes can be passed on from the parser's callback, without waking a task. So a token costs
little here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import httptools
from multidict import CIMultiDict

from dynamo_lite.forward import engines
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import FailureKind, LegFailed, LegKind, check_size
from dynamo_lite.runtime.lost_host import notice_a_lost_host

#: Size limit of an answer's head, in bytes.
_MAX_HEAD_BYTES = 64 << 10
#: How many bytes of a body are buffered before reading pauses.
_BUFFER_BYTES = 64 << 10
#: Below uvicorn's default of 5 s: a connection must not be used while the engine closes it.
_KEEP_ALIVE_S = 4.0
#: A connection is lost when the engine's host acknowledges nothing for this long.
_LOST_HOST_S = 20.0

#: Takes arrived bytes at once. Returns whether it has room for more.
Push = Callable[[bytes], bool]


class EngineAnswer:
    """One answer: its head, and its body as it comes.

    All methods that wait raise LegFailed: `timeout` when nothing has come for `idle_s` (not
    counting the time while nothing is read), `broken` when the connection is lost or the answer is
    not HTTP.
    """

    def __init__(
        self,
        connection: "UpstreamConnection",
        engine: KnownEngine,
        leg: LegKind,
        idle_s: float,
        *,
        bodyless: bool,
    ):
        self.engine = engine
        self.leg: LegKind = leg
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        #: Whether its head has come.
        self.begun = False
        #: Whether the request has the method HEAD: no body follows, whatever the head says.
        self.bodyless = bodyless
        #: Whether the client has got any of it, so that no other engine can be asked. Its reader
        #: says so.
        self.shown = False
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: BaseException | None = None
        self._happened = asyncio.Event()
        self._push: Push | None = None
        self._full = False
        self._idle_s = idle_s
        self.touched = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._look_idle)
        engine.on_end.add(self._engine_ended)

    @property
    def is_stream(self) -> bool:
        content_type = self.headers.get("content-type", "").partition(";")[0]
        return content_type.strip().lower() == "text/event-stream"

    async def head(self) -> None:
        while not self.begun:
            await self._more()

    async def read_some(self) -> bytes:
        """The bytes that have arrived; empty at the end."""
        while not self._parts:
            if not await self._more():
                return b""
        return self._take()

    async def read(self) -> bytes:
        """The rest of the body. Raises LegFailed also if it is too large."""
        found = bytearray()
        while part := await self.read_some():
            found += part
            check_size(len(found), self.engine, self.leg)
        return bytes(found)

    async def pass_on(self, push: Push, drained: Callable[[], Awaitable[None]]) -> None:
        """Passes arriving bytes to `push` at once. When `push` has no room, reading pauses
        until `drained` returns. An exception of `push` is raised here."""
        try:
            while True:
                if self._parts:
                    self._full = not push(self._take())
                if self._full:
                    self._push = None
                    self._hold()
                    await drained()
                    self._full = False
                    self._resume()
                    continue
                self._push = push
                if not await self._more():
                    return
        finally:
            self._push = None

    def close(self) -> None:
        """Before the end, this breaks the connection: the engine then aborts the request."""
        if not self._ended:
            self.lost("closed here")

    # Called by the connection.

    def begin(self, status: int) -> None:
        self.status, self.begun = status, True
        self._happened.set()

    def feed(self, data: bytes) -> None:
        if self._push is None:
            self._parts.append(data)
            self._size += len(data)
            if self._size > _BUFFER_BYTES:
                self._hold()
            self._happened.set()
            return
        try:
            room = self._push(data)
        except BaseException as exc:  # raised to the caller of `pass_on`
            self._push = None
            self.fail(exc)
        else:
            if not room:
                self._full = True
                self._hold()
                self._happened.set()

    def end(self) -> None:
        self._ended = True
        self._settled()

    def fail(self, error: BaseException) -> None:
        if not self._ended and self._error is None:
            self._error = error
            self._settled()

    def lost(self, detail: str, kind: FailureKind = "broken") -> None:
        """Fails, and breaks the connection."""
        self.fail(LegFailed(self.engine, self.leg, kind, detail))
        self._connection.abort()

    def _settled(self) -> None:
        self._timer.cancel()
        self.engine.on_end.discard(self._engine_ended)
        self._happened.set()

    def _engine_ended(self, why: str, refuses: bool) -> None:
        """An engine that ends may leave requests hanging. A part that the client has cannot be
        repeated: it may go on, unless no process is left that would send the rest."""
        silent = self._loop.time() - self.touched >= engines.SILENCE_S
        if silent and not self._connection.paused and (refuses or not self.shown):
            self.lost(f"silent, and the engine has ended: {why}")

    def _take(self) -> bytes:
        parts, self._parts = self._parts, []
        if self._size > _BUFFER_BYTES:
            self._resume()
        self._size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self) -> None:
        """Pauses reading, except after the end: then another answer may come on the connection."""
        if not self._ended:
            self._connection.pause()

    def _resume(self) -> None:
        self.touched = self._loop.time()
        if not self._ended:
            self._connection.resume()

    async def _more(self) -> bool:
        """Returns when something has happened; False after the end."""
        if self._error is not None:
            raise self._error
        if self._ended:
            return False
        self._happened.clear()
        await self._happened.wait()
        return True

    def _look_idle(self) -> None:
        """One timer for the whole answer, and not one for each piece of it."""
        if self._connection.paused:
            self.touched = self._loop.time()
        left_s = self.touched + self._idle_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look_idle)
            return
        self.lost(f"nothing for {self._idle_s:g} s", "timeout")


class UpstreamConnection(asyncio.Protocol):
    """Carries one request at a time. on_free: called when an answer has ended, and another
    request may follow. on_lost: called when the connection is closed."""

    def __init__(
        self,
        on_free: Callable[["UpstreamConnection"], None],
        on_lost: Callable[["UpstreamConnection"], None],
    ):
        self.paused = False
        self._on_free, self._on_lost = on_free, on_lost
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        #: The one that comes on it now.
        self.answer: EngineAnswer | None = None
        self._head_bytes = 0
        self._informational = False
        #: When its last answer ended, in the loop's time.
        self._ended_at = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: after an early answer a part of the request before
        may be unsent."""
        transport = self._transport
        open_ = not transport.is_closing() and transport.get_write_buffer_size() == 0
        return open_ and self._loop.time() - self._ended_at < _KEEP_ALIVE_S

    def ask(self, answer: EngineAnswer, request: Sequence[bytes]) -> None:
        self.answer = answer
        self._head_bytes = 0
        self._transport.writelines(request)

    def abort(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        if not self.paused and not self._transport.is_closing():
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        notice_a_lost_host(transport.get_extra_info("socket"), _LOST_HOST_S)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:
            return self.abort()
        answer.engine.heard_at = answer.touched = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            return answer.lost(f"not HTTP: {exc}")
        if not answer.begun:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                answer.lost(f"a head of more than {_MAX_HEAD_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.lost("closed before the end of the answer")
        self._on_lost(self)

    # httptools

    def on_message_begin(self) -> None:
        if self.answer is None:
            self.abort()  # nothing was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self.answer
        if answer is not None and not answer.begun:  # after it they are trailers
            text = value.strip(b" \t").decode("utf-8", "surrogateescape")
            answer.headers.add(name.decode("latin-1"), text)

    def on_headers_complete(self) -> None:
        answer = self.answer
        if answer is None:
            return
        status = self._parser.get_status_code()
        self._informational = 100 <= status < 200
        if self._informational:
            answer.headers.clear()
            return
        answer.begin(status)
        if answer.bodyless:
            self._ended(reusable=False)  # the parser would wait for the body

    def on_body(self, body: bytes) -> None:
        if self.answer is not None:
            self.answer.feed(body)

    def on_message_complete(self) -> None:
        if not self._informational and self.answer is not None:
            self._ended(reusable=self._parser.should_keep_alive())

    def _ended(self, *, reusable: bool) -> None:
        answer, self.answer = self.answer, None
        assert answer is not None
        answer.end()
        self.resume()
        self._ended_at = self._loop.time()
        if reusable and self.usable:
            self._on_free(self)
        else:
            self.abort()
