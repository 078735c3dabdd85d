"""The answer of an engine, as it comes on a connection.

Arriving bytes can be passed on from the parser's callback, without waking a task. So a token costs
little here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from multidict import CIMultiDict

#: How many bytes of a body are buffered before reading pauses.
_BUFFER_BYTES = 64 << 10
#: Most bytes of a whole answer, or of one event that may have to be changed, that are kept in
#: memory. An answer that passes as bytes has no limit.
MAX_WHOLE_BYTES = 256 << 20
_NO_BODY = frozenset({204, 304})

#: Takes arrived bytes at once. Returns whether it has room for more.
Push = Callable[[bytes], bool]


class TooLarge(Exception):
    """More than `MAX_WHOLE_BYTES` would have to be kept."""

    def __init__(self) -> None:
        super().__init__(f"larger than {MAX_WHOLE_BYTES >> 20} MiB")


class Reading(Protocol):
    """The connection, as its answer sees it."""

    paused: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


class EngineAnswer:
    """One answer: its head, and its body as it comes.

    All methods that wait raise TimeoutError when nothing has come for `idle_s` (not counting the
    time while nothing is read), and ConnectionError when the connection is lost or the answer is
    not HTTP.
    """

    def __init__(self, connection: Reading, idle_s: float, *, bodyless: bool):
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
        self._waiter: asyncio.Future[None] | None = None
        self._push: Push | None = None
        self._full = False
        self._idle_s = idle_s
        self._left = False
        self.touched = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._look_idle)

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def head(self) -> None:
        while not self.begun:
            self._raise_error()
            await self._wait()

    async def read_some(self) -> bytes:
        """The bytes that have arrived; empty at the end."""
        while not self._parts:
            self._raise_error()
            if self._ended:
                return b""
            await self._wait()
        return self._take()

    async def read(self) -> bytes:
        """The rest of the body. Raises TooLarge."""
        found: list[bytes] = []
        size = 0
        while part := await self.read_some():
            size += len(part)
            if size > MAX_WHOLE_BYTES:
                raise TooLarge
            found.append(part)
        return found[0] if len(found) == 1 else b"".join(found)

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
                self._raise_error()
                if self._ended:
                    return
                self._push = push
                await self._wait()
        finally:
            self._push = None

    def close(self) -> None:
        """Before the end, this breaks the connection: the engine then aborts the request."""
        if not self._ended:
            self.fail(ConnectionAbortedError("closed here"))
            self._connection.abort()

    # Called by the connection.

    def begin(self, status: int) -> None:
        self.status, self.begun = status, True
        self._wake()

    def feed(self, data: bytes) -> None:
        if self._push is None:
            self._parts.append(data)
            self._size += len(data)
            if self._size > _BUFFER_BYTES:
                self._hold()
            self._wake()
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
                self._wake()

    def end(self) -> None:
        self._ended = True
        self._timer.cancel()
        self._wake()

    def fail(self, error: BaseException) -> None:
        if not self._ended and self._error is None:
            self._error = error
            self._timer.cancel()
            self._wake()

    def left(self, silence_s: float) -> None:
        """The engine accepts no connections any more. The answer continues while bytes arrive."""
        if not (self._left or self._ended):
            self._left, self._idle_s = True, min(silence_s, self._idle_s)
            self.touched = self._loop.time()
            self._timer.cancel()
            self._look_idle()

    def give_up(self, why: str) -> bool:
        """Breaks the connection unless a part of the answer was shown. Returns whether it did."""
        if self.shown or self._ended or self._error is not None:
            return False
        self.fail(ConnectionResetError(why))
        self._connection.abort()
        return True

    def until_closed(self) -> bool:
        """Whether the end of the connection is the end of this answer."""
        if not self.begun or self.status in _NO_BODY or "content-length" in self.headers:
            return False
        return "chunked" not in self.headers.get("transfer-encoding", "").lower()

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

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_idle(self) -> None:
        """One timer for the whole answer, and not one for each piece of it."""
        if self._connection.paused:
            self.touched = self._loop.time()
        left_s = self.touched + self._idle_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look_idle)
            return
        why = f"nothing for {self._idle_s:g} s"
        if self._left:
            self.fail(ConnectionResetError(f"{why}, and the engine refuses connections"))
        else:
            self.fail(TimeoutError(why))
        self._connection.abort()
