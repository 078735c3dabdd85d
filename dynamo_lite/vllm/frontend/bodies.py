"""Receives request bodies within limits on size, time and number.

vLLM's app parses and validates a body on the event loop that also serves all streams (0.02
to 0.3 s per MiB), and tokenizes all prompts in one thread. So each body is received here
first, and large ones are passed to the app one at a time, with pauses for the streams.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo_lite.vllm.frontend.edge import current_context, late_message
from dynamo_lite.vllm.frontend.refusal import header, refuse

#: Larger bodies would block the event loop for too long.
MAX_BODY_BYTES = 32 << 20

#: After a refusal, how long and how many bytes are still read from a client that is sending, so
#: that it reads the answer before the connection is closed.
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20


def body_limit(max_model_len: int, *, media: bool = False) -> int:
    """Returns the limit on a body in bytes for a model of `max_model_len` tokens.

    It is `MAX_BODY_BYTES` where prompts may have media or embeddings. For text it is 64 bytes per
    token (JSON needs 6 for an escaped character, and tokens of whitespace or source code are long)
    and 2 MiB for everything else, like tools or a list of prompts; at most `MAX_BODY_BYTES`.
    """
    return MAX_BODY_BYTES if media else min(MAX_BODY_BYTES, (2 << 20) + 64 * max_model_len)


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


#: The longest turn: a prompt's media may be downloaded in it, from a slow host.
_MAX_TURN_S = 2.0


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
        #: Large requests: one at a time uses the event loop and the tokenizer.
        self._turn = asyncio.Lock()
        self._resume_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Requests without a body may come without the key, and may not hold memory.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        try:
            body, turn = await self._accept(scope, receive)
        except _Refusal as refusal:
            return await _refuse(refusal, receive, send)
        except _Gone:
            return
        if (context := current_context()) is not None:
            context.on_placing = turn.close

        async def answer(message: Message) -> None:
            turn.close()
            await send(message)

        # Until the request is sent to a worker or the answer begins, it is parsed and tokenized.
        with turn:
            await self._app(scope, _passed_on(body, receive), answer)

    async def _accept(self, scope: Scope, receive: Receive) -> tuple[list[bytes], ExitStack]:
        """Returns the body in a list, and what ends the turn of a large one. Raises _Refusal,
        _Gone."""
        body = _Body()
        try:
            await self._receive(scope, receive, body)
            whole = b"".join(body.chunks)
            body.chunks.clear()
            large = body.size >= self._limits.large_bytes
            return [whole], await self._wait_for_turn(receive) if large else ExitStack()
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

    async def _wait_for_turn(self, receive: Receive) -> ExitStack:
        """The turn is over when the result is closed, at the latest after `_MAX_TURN_S`. Raises
        _Refusal if the request times out, _Gone if the client has disconnected."""
        context, loop = current_context(), asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                async with asyncio.timeout_at(None if context is None else context.deadline):
                    await self._turn.acquire()
                    stack.callback(self._turn.release)
                    await asyncio.sleep(self._resume_at - loop.time())
            except TimeoutError as exc:
                assert context is not None
                message = late_message(context.timeout_s)
                raise _Refusal(HTTPStatus.GATEWAY_TIMEOUT, "Gateway Timeout", message) from exc
            if await _has_gone(receive):
                raise _Gone
            stack.callback(self._pause, time.thread_time())
            turn = stack.pop_all()
        turn.callback(loop.call_later(_MAX_TURN_S, turn.close).cancel)
        return turn

    def _pause(self, began_s: float) -> None:
        """The next turn begins when the event loop has had as much time for the streams as it has
        computed in this one. began_s: the thread's CPU time at its beginning."""
        used_s = time.thread_time() - began_s
        self._resume_at = asyncio.get_running_loop().time() + used_s


def _passed_on(body: list[bytes], receive: Receive) -> Receive:
    """Receives the body in one message. Takes it from the list, so that it can be freed."""

    async def passed_on() -> Message:
        if not body:
            return await receive()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return passed_on


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
    early = refusal.status is not HTTPStatus.GATEWAY_TIMEOUT
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
