"""Receives request bodies within limits on size, time and number, and checks their encoding.

vLLM's app parses and validates a body on the event loop that also serves all streams (0.02
to 0.3 s per MiB), and tokenizes all prompts in one thread. So each body is received here
first, and large ones are passed to the app one at a time, with pauses for the streams.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo_lite.vllm.frontend.edge import current_context, late_message
from dynamo_lite.vllm.frontend.refusal import header, refuse

#: Larger bodies cannot be served: a request to a worker has at most 8 MiB of msgpack.
MAX_BODY_BYTES = 32 << 20

#: After a refusal, how long and how many bytes are still read from a client that is sending, so
#: that it reads the answer before the connection is closed.
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: Text up to the first half of a surrogate pair. It is one match, because a loop over millions of
#: escapes would block the event loop.
_PAIRED = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\(?!u[dD][89a-fA-F][0-9a-fA-F]{2}).)*+",
    re.DOTALL,
)
_LONE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def body_limit(max_model_len: int) -> int:
    """Returns the limit on a body in bytes for a model of `max_model_len` tokens.

    It is 64 bytes per token (JSON needs 6 for an escaped character, and tokens of whitespace
    or source code are long) and 2 MiB for everything else, like tools or a list of prompts;
    at most `MAX_BODY_BYTES`.
    """
    return min(MAX_BODY_BYTES, (2 << 20) + 64 * max_model_len)


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits on request bodies."""

    #: Size of one body.
    max_bytes: int = MAX_BODY_BYTES
    #: Bodies from this size on take turns.
    large_bytes: int = 16 << 10
    #: Total size of large bodies that arrive or wait for their turn.
    held_bytes: int = 256 << 20
    #: Timeout for a body to arrive.
    body_s: float = 60.0


#: Iterations of the event loop in which the app parses a body: middleware may pass it on through
#: several callbacks.
_ITERATIONS = 4


class LoopTurns:
    """Turns of large requests: one at a time uses the event loop and the tokenizer, in order of
    arrival. After each there is a pause as long as the turn
    has blocked the event loop, at most `max_pause_s`. A turn ends after `max_turn_s` at most.
    """

    def __init__(self, max_pause_s: float = 5.0, max_turn_s: float = 10.0):
        self.max_pause_s, self.max_turn_s = max_pause_s, max_turn_s
        self.resume_at = 0.0
        self._lock = asyncio.Lock()

    async def wait(self) -> "Turn":
        """Waits for the caller's turn. The caller must end it."""
        await self._lock.acquire()
        try:
            pause_s = self.resume_at - asyncio.get_running_loop().time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        except BaseException:
            self._lock.release()
            raise
        return Turn(self, self._lock)


class Turn:
    """A turn in progress; `end` is idempotent."""

    def __init__(self, turns: LoopTurns, lock: asyncio.Lock):
        self._turns, self._lock = turns, lock
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(turns.max_turn_s, self.end)

    def handed_over(self) -> None:
        """The app has the body: measures how long it blocks the event loop from here on."""
        self._loop.call_soon(self._measure, self._loop.time(), _ITERATIONS)

    def end(self) -> None:
        self._timer.cancel()
        if not self._ended:
            self._ended = True
            self._lock.release()

    def _measure(self, began: float, iterations: int) -> None:
        if iterations:
            self._loop.call_soon(self._measure, began, iterations - 1)
            return
        now = self._loop.time()
        pause_s = min(now - began, self._turns.max_pause_s)
        self._turns.resume_at = max(self._turns.resume_at, now + pause_s)


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, kind: str, message: str):
        super().__init__(message)
        self.status, self.kind = status, kind


class _Gone(Exception):
    """The client has disconnected."""


@dataclass
class _Body:
    chunks: list[bytes] = field(default_factory=list[bytes])
    size: int = 0
    #: Bytes of it that count against `held_bytes`.
    held: int = 0


class Bodies:
    """ASGI middleware: passes each body to the app in one message, or refuses it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits):
        self._app, self._limits = app, limits
        self._held = 0
        self._turns = LoopTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            whole, turn = await self._accept(scope, receive)
        except _Refusal as refusal:
            return await _refuse(refusal, receive, send)
        except _Gone:
            return
        handover = _Handover(whole, receive, send, turn)
        del whole
        try:
            await self._app(scope, handover.receive, send if turn is None else handover.send)
        finally:
            handover.close()

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[bytes, Turn | None]:
        """Returns the body, and the turn of a large one. Raises _Refusal, _Gone."""
        body = _Body()
        try:
            await self._receive(scope, receive, body)
            whole = b"".join(body.chunks)
            body.chunks.clear()
            _check_text(scope, whole)
            large = body.size >= self._limits.large_bytes
            return whole, await self._wait_for_turn(receive) if large else None
        finally:
            # Free the memory before more is read from a refused client.
            body.chunks.clear()
            self._held -= body.held

    async def _receive(self, scope: Scope, receive: Receive, body: _Body) -> None:
        """Raises _Refusal, _Gone."""
        length = header(scope, b"content-length") or b""
        if length.isdigit() and int(length) > self._limits.max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    self._add(body, message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError as exc:
            raise _Refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                "RequestTimeout",
                f"The request's body did not arrive within {self._limits.body_s:g} s",
            ) from exc

    def _add(self, body: _Body, chunk: bytes) -> None:
        body.chunks.append(chunk)
        body.size += len(chunk)
        if body.size > self._limits.max_bytes:
            raise self._too_large()
        if body.size < self._limits.large_bytes:
            return
        more = body.size - body.held
        if self._held + more > self._limits.held_bytes:
            raise _Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "ServiceUnavailableError",
                f"Large requests of {self._held} bytes together are waiting already."
                " Please try again later.",
            )
        self._held += more
        body.held += more

    def _too_large(self) -> _Refusal:
        return _Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "RequestEntityTooLarge",
            f"The request's body has more than {self._limits.max_bytes} bytes, which is"
            " the limit here (the Frontend's `max-body-bytes`)",
        )

    async def _wait_for_turn(self, receive: Receive) -> Turn:
        """Raises _Refusal if the request times out, _Gone if the client has disconnected."""
        context = current_context()
        try:
            async with asyncio.timeout_at(None if context is None else context.deadline):
                turn = await self._turns.wait()
        except TimeoutError as exc:
            assert context is not None
            message = late_message(context.timeout_s)
            raise _Refusal(HTTPStatus.GATEWAY_TIMEOUT, "Gateway Timeout", message) from exc
        try:
            if await _has_gone(receive):
                raise _Gone
        except BaseException:
            turn.end()
            raise
        return turn


class _Handover:
    """Passes a body to the app. turn: of a large body; it ends when the request is sent to a
    worker or the answer begins: until then the body is parsed and tokenized.
    """

    def __init__(self, whole: bytes, receive: Receive, send: Send, turn: Turn | None):
        self._whole: bytes | None = whole
        self._receive, self._send, self._turn = receive, send, turn

    async def receive(self) -> Message:
        if (whole := self._whole) is None:
            return await self._receive()
        self._whole = None
        if self._turn is not None:
            self._turn.handed_over()
            if (context := current_context()) is not None:
                context.on_placing = self._turn.end
        return {"type": "http.request", "body": whole, "more_body": False}

    async def send(self, message: Message) -> None:
        self.close()
        await self._send(message)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.end()


def _check_text(scope: Scope, body: bytes) -> None:
    """Raises _Refusal unless a JSON body is UTF-8 and all its strings can be encoded.

    `json.loads` accepts other encodings, and strings with half of a surrogate pair, which
    would fail later: in the tokenizer, in a message, or in the answer.
    """
    if (header(scope, b"content-type") or b"").startswith(b"multipart/"):
        return
    problem = ""
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        problem = "it is not UTF-8"
    else:
        try:
            body.decode()
        except UnicodeDecodeError as exc:
            problem = f"byte {exc.start} is not UTF-8"
    if not problem and _SURROGATE.search(body):
        paired = _PAIRED.match(body)
        lone = _LONE.match(body, paired.end() if paired else 0)
        if lone is not None:
            escape = lone.group().decode()
            problem = f"{escape} at byte {lone.start()} is half of a surrogate pair, no character"
    if problem:
        raise _Refusal(
            HTTPStatus.BAD_REQUEST,
            "BadRequestError",
            f"The request's body is not valid text: {problem}",
        )


async def _has_gone(receive: Receive) -> bool:
    """Whether the client has disconnected. Its whole body must have been received."""
    try:
        async with asyncio.timeout(0):
            return (await receive())["type"] == "http.disconnect"
    except TimeoutError:
        return False


async def _refuse(refusal: _Refusal, receive: Receive, send: Send) -> None:
    """Refuses the request; if its body is incomplete, makes the server close the connection, so
    that the rest is not read into memory."""
    early = refusal.status in (
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
    headers = ((b"connection", b"close"),) if early else ()

    async def answer(message: Message) -> None:
        if early and message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            await _linger(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    await refuse(answer, refusal.status, str(refusal), kind=refusal.kind, headers=headers)


async def _linger(receive: Receive) -> None:
    dropped = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while dropped < _LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                dropped += len(message.get("body", b""))
            await asyncio.sleep(_LINGER_S)
    except TimeoutError:
        pass
