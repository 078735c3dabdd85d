"""The errors that the HTTP edge answers: as vLLM's exceptions, and in the form of vLLM's app."""

import asyncio
import json
import math
from collections.abc import Iterable
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Message, Receive, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    Overloaded,
    Refused,
)
from dynamo_lite.protocol.generate import EngineError

TIMEOUT_HEADER = "x-request-timeout"

Headers = Iterable[tuple[bytes, bytes]]

CLOSE = (b"connection", b"close")

#: After a refusal, how long and how many bytes are still read from a client that is sending, so
#: that it reads the answer before the connection is closed.
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20


def http_error(error: DynamoLiteError) -> VLLMError:
    """Returns the exception that vLLM's app answers with the right status for `error`."""
    if isinstance(error, Refused):
        return VLLMValidationError(error.reason)
    if isinstance(error, DeadlineExceeded):
        return late_error(error.after_s)
    if isinstance(error, Overloaded):
        return GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS)
    return GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


def engine_failure(error: EngineError) -> VLLMError:
    """As `http_error`, for a request that its engine has ended with an error."""
    if error.invalid:
        return VLLMValidationError(error.message)
    status = HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(error.message, status)


def late_error(after_s: float) -> GracefulHTTPError:
    """For a request with a timeout of `after_s`."""
    seconds = math.ceil(after_s * 10) / 10
    text = f"The request did not finish within its {seconds:g} s ({TIMEOUT_HEADER})"
    return GracefulHTTPError(text, HTTPStatus.GATEWAY_TIMEOUT)


async def refuse(send: Send, error: VLLMError, headers: Headers = ()) -> None:
    """Sends an error as the whole response. headers: others; those about content are dropped."""
    status, body = _status_and_body(error)
    answer = Response(body, status, media_type="application/json")
    others = [pair for pair in headers if not pair[0].lower().startswith(b"content-")]
    head = {"status": status, "headers": [*others, *answer.raw_headers]}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": body})


def error_event(error: VLLMError) -> bytes:
    """The error as the last event of a stream."""
    return b"event: error\ndata: %b\n\n" % _status_and_body(error)[1]


def _status_and_body(error: VLLMError) -> tuple[int, bytes]:
    """As all APIs have it: Anthropic's also names its type outside."""
    info = create_error_response(error).error
    return info.code, json.dumps({"type": "error", "error": info.model_dump()}).encode()


async def refuse_unread(receive: Receive, send: Send, error: VLLMError) -> None:
    """As `refuse`, for a request whose body is incomplete: makes the server close the connection,
    so that the rest is not read into memory."""

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            await _linger(receive)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    await refuse(answer, error, [CLOSE])


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
