"""Receives request bodies within limits on size, time and number.

vLLM's app parses and validates a body on the event loop that also serves all streams (0.02
to 0.3 s per MiB), and tokenizes all prompts in one thread. So each body is received here
first, and large ones are passed to the app one at a time, with pauses for the streams.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GracefulHTTPError

from dynamo_lite.vllm.frontend.edge import current_context
from dynamo_lite.vllm.frontend.refusal import refuse, refuse_unread
from dynamo_lite.vllm.frontend.turns import BodyTurns

#: Larger bodies would block the event loop for too long.
MAX_BODY_BYTES = 32 << 20


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
        self._turns = BodyTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Requests without a body may come without the key, and may not hold memory.
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        try:
            body, turn = await self._accept(scope, receive)
        except GracefulHTTPError as refusal:
            if refusal.http_status is HTTPStatus.GATEWAY_TIMEOUT:  # the whole body was received
                return await refuse(send, refusal)
            return await refuse_unread(receive, send, refusal)
        except ClientDisconnect:
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
        """Returns the body in a list, and what ends the turn of a large one.

        Raises GracefulHTTPError, ClientDisconnect.
        """
        body = _Body()
        try:
            await self._receive(scope, receive, body)
            whole = b"".join(body.chunks)
            body.chunks.clear()
            large = body.size >= self._limits.large_bytes
            turn = await self._turns.wait(current_context(), receive) if large else ExitStack()
            return [whole], turn
        finally:
            # Free the memory before more is read from a refused client.
            body.chunks.clear()
            self._held -= body.held

    async def _receive(self, scope: Scope, receive: Receive, body: _Body) -> None:
        """Raises GracefulHTTPError, ClientDisconnect."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._limits.max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    self._add(body, message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError as exc:
            raise GracefulHTTPError(
                f"The request's body did not arrive within {self._limits.body_s:g} s",
                HTTPStatus.REQUEST_TIMEOUT,
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
            raise GracefulHTTPError(
                f"Large requests of {self._held} bytes together are waiting already."
                " Please try again later.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        self._held += more
        body.held += more

    def _too_large(self) -> GracefulHTTPError:
        return GracefulHTTPError(
            f"The request's body has more than {self._limits.max_bytes} bytes, which is"
            " the limit here (the Frontend's `max-body-bytes`)",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )


def _passed_on(body: list[bytes], receive: Receive) -> Receive:
    """Receives the body in one message. Takes it from the list, so that it can be freed."""

    async def passed_on() -> Message:
        if not body:
            return await receive()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    return passed_on
