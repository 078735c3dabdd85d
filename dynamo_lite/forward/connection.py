"""A connection to an engine. The parser is llhttp, through httptools."""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from dynamo_lite.forward.engine_answer import EngineAnswer
from dynamo_lite.runtime.lost_host import notice_a_lost_host

#: Size limit of an answer's head, in bytes.
_MAX_HEAD_BYTES = 64 << 10
#: A connection is lost when the engine's host acknowledges nothing for this long.
_LOST_HOST_S = 20.0


class UpstreamConnection(asyncio.Protocol):
    """Carries one request at a time. on_free: called when an answer has ended, and another
    request may follow. on_lost: called when the connection is closed."""

    def __init__(
        self,
        on_free: Callable[["UpstreamConnection"], None],
        on_lost: Callable[["UpstreamConnection"], None],
    ):
        self.paused = False
        #: When the engine's last bytes came, in the loop's time; 0: none has come.
        self.heard_at = 0.0
        self._on_free, self._on_lost = on_free, on_lost
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._answer: EngineAnswer | None = None
        self._head_bytes = 0
        self._informational = False
        self._unasked = False
        self._tls = self._eof = False

    @property
    def usable(self) -> bool:
        return self._answer is None and self._open

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _sent(self) -> bool:
        """Whether it is open and has sent all bytes. After an early answer a part of the
        request may be unsent."""
        transport = self._transport
        return self._open and transport is not None and transport.get_write_buffer_size() == 0

    def ask(
        self, head: bytes, body: bytes | None, idle_s: float, *, bodyless: bool
    ) -> EngineAnswer:
        self._answer = answer = EngineAnswer(self, idle_s, bodyless=bodyless)
        self._head_bytes = 0
        assert self._transport is not None
        self._transport.writelines((head, body) if body else (head,))
        return answer

    def left(self, silence_s: float) -> None:
        """See `EngineAnswer.left`."""
        if self._answer is not None:
            self._answer.left(silence_s)

    def give_up(self, why: str) -> bool:
        """See `EngineAnswer.give_up`."""
        return self._answer is not None and self._answer.give_up(why)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self.paused and self._transport is not None and self._open:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            if self._transport is not None and self._open:
                self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._tls = transport.get_extra_info("ssl_object") is not None
        notice_a_lost_host(transport.get_extra_info("socket"), _LOST_HOST_S)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return self.abort()  # nothing was asked
        self.heard_at = answer.touched = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            return self._fail(ConnectionError(f"not HTTP: {exc}"))
        if not answer.begun:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._fail(ConnectionError(f"a head of more than {_MAX_HEAD_BYTES} bytes"))
        if self._unasked:
            self.abort()

    def eof_received(self) -> None:
        self._eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            # TLS may be closed without notice, and then drops the bytes that were not read yet.
            if exc is None and answer.until_closed() and (self._eof or not self._tls):
                answer.end()
            else:
                answer.fail(ConnectionResetError("closed before the end of the answer"))
        self._on_lost(self)

    # httptools

    def on_message_begin(self) -> None:
        self._unasked = self._answer is None

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.begun:  # after it they are trailers
            text = value.strip(b" \t").decode("utf-8", "surrogateescape")
            answer.headers.add(name.decode("latin-1"), text)

    def on_headers_complete(self) -> None:
        answer = self._answer
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
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        if not self._informational and self._answer is not None:
            self._ended(reusable=self._parser.should_keep_alive())

    def _ended(self, *, reusable: bool) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.end()
        self.resume()
        if reusable and self._sent:
            self._on_free(self)
        else:
            self.abort()

    def _fail(self, error: ConnectionError) -> None:
        if self._answer is not None:
            self._answer.fail(error)
        self.abort()
