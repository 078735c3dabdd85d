"""The HTTP middleware around vLLM's app: timeouts, sessions and `Retry-After`.

It reads the headers `x-request-timeout` and `x-session-id`, sets the deadline that all
sequences of one HTTP request share, adds `Retry-After`, gives a stream that fails before its first
output the status of its error, and ends a later one of `/v1/responses` and `/v1/messages` with
an error event (https://platform.openai.com/docs/api-reference/responses-streaming/error,
https://docs.anthropic.com/en/docs/build-with-claude/streaming#error-events).
"""

import asyncio
import json
import math
import time
from contextvars import ContextVar
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError

from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    Overloaded,
    Refused,
)
from dynamo_lite.protocol.generate import EngineError
from dynamo_lite.protocol.trace import TRACEPARENT, TraceContext, trace_of
from dynamo_lite.runtime.tracing import Tracer
from dynamo_lite.vllm.frontend.refusal import header, json_head, refuse
from dynamo_lite.vllm.frontend.request_context import MAX_SESSION, RequestContext

TIMEOUT_HEADER = "x-request-timeout"
SESSION_HEADER = "x-session-id"

#: A retry may succeed after these.
_RETRYABLE = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
#: Events that come before any output.
_NO_OUTPUT = (b"event: response.created\n", b"event: response.in_progress\n")
_MESSAGES = "/v1/messages"


#: Inherited by the tasks that the app starts for a request.
_context: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current_context() -> RequestContext | None:
    """Returns the HTTP request of the running task; None outside of one."""
    return _context.get()


def http_error(error: DynamoLiteError) -> VLLMError:
    """Returns the exception that vLLM's app answers with the right status for `error`."""
    if isinstance(error, Refused):
        return VLLMValidationError(error.reason)
    if isinstance(error, DeadlineExceeded):
        return GracefulHTTPError(late_message(error.after_s), HTTPStatus.GATEWAY_TIMEOUT)
    if isinstance(error, Overloaded):
        return GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS)
    return GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


def engine_failure(error: EngineError) -> VLLMError:
    """As `http_error`, for a request that its engine has ended with an error."""
    if error.invalid:
        return VLLMValidationError(error.message)
    status = HTTPStatus.SERVICE_UNAVAILABLE if error.retryable else HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(error.message, status)


def late_message(after_s: float) -> str:
    """The error message for a request with a timeout of `after_s`."""
    seconds = math.ceil(after_s * 10) / 10
    return f"The request did not finish within its {seconds:g} s ({TIMEOUT_HEADER})"


class Edge:
    """ASGI middleware.

    default_timeout_s: timeout of a request without the header. max_timeout_s: upper limit on
    the header. tracer: None without tracing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        default_timeout_s: float,
        max_timeout_s: float,
        tracer: Tracer | None = None,
    ):
        self._app, self._tracer = app, tracer
        self._default_timeout_s = min(default_timeout_s, max_timeout_s)
        self._max_timeout_s = max_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._tracer is None or (found := _trace_of(self._tracer, scope)) is None:
            return await self._answer(scope, receive, send, None)
        (trace, parent), began, status = found, time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, noted, trace)
        finally:  # the answer is complete, or the client has disconnected
            _record_span(self._tracer, scope, trace, parent, began, status)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, trace: TraceContext | None
    ) -> None:
        now = asyncio.get_running_loop().time()
        try:
            timeout_s = self._timeout_s(scope)
        except ValueError as exc:
            return await refuse(send, HTTPStatus.BAD_REQUEST, str(exc), param=TIMEOUT_HEADER)
        context = RequestContext(
            timeout_s, deadline=now + timeout_s, session=_session(scope), trace=trace
        )
        token = _context.set(context)
        answer = _Answer(send, context, messages=scope["path"].endswith(_MESSAGES))
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if context.error is None or not answer.streams:
                raise
            await answer.fail(context.error)
        finally:
            _context.reset(token)

    def _timeout_s(self, scope: Scope) -> float:
        """Raises ValueError with a message for the client."""
        text = header(scope, TIMEOUT_HEADER.encode())
        if text is None:
            return self._default_timeout_s
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(
                f"{TIMEOUT_HEADER}: expected seconds as a number greater than 0,"
                f" got {text.decode('latin-1')!r}"
            )
        return min(timeout_s, self._max_timeout_s)


def _session(scope: Scope) -> str | None:
    value = header(scope, SESSION_HEADER.encode())
    return value.decode("latin-1")[:MAX_SESSION] if value else None


class _Answer:
    """Sends the app's answer. messages: whether it is one of Anthropic's API.

    The head of an event stream waits for the first event with output. If the request fails before
    it, the answer becomes the error with its status.
    """

    def __init__(self, send: Send, context: RequestContext, *, messages: bool):
        self._send, self._context, self._messages = send, context, messages
        #: The head and the first events of a stream, while they wait.
        self._held: list[Message] = []
        self._events = 0
        self._replaced = self.streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] == HTTPStatus.OK and _is_event_stream(message):
                self.streams = True
                self._held = [message]
            else:
                await self._send(_with_retry_after(message))
            return
        if self._replaced:
            return
        error, body = self._context.error, message.get("body", b"")
        if self._held:
            more = message.get("more_body", False)
            if error is not None:
                return await self._refuse(error)
            # A client asks for a background response by the id in its first event.
            silent = body.startswith(_NO_OUTPUT) and b'"background":true' not in body
            if more and (silent or not body):
                return self._held.append(message)
            await self._release()
        # vLLM does not know our errors as events of this API.
        if error is not None and self._messages and body.startswith(b"event: error"):
            message = {**message, "body": self._error_event(error)}
        self._events += 1
        await self._send(message)

    async def fail(self, error: VLLMError) -> None:
        """The app has broken off an event stream because of `error`."""
        if self._held:
            return await self._refuse(error)
        await self._send({"type": "http.response.body", "body": self._error_event(error)})

    async def _refuse(self, error: VLLMError) -> None:
        """The error in the place of the stream."""
        head, self._held, self._replaced = self._held[0], [], True
        info = _info(error)
        known = {"type": "error"} if self._messages else {}
        body = json.dumps({**known, "error": self._described(info)}).encode()
        await self._send(_with_retry_after(json_head(info.code, body, head.get("headers", ()))))
        await self._send({"type": "http.response.body", "body": body})

    async def _release(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._events += 1
            await self._send(message)

    def _described(self, info: ErrorInfo) -> dict[str, object]:
        return info.model_dump(include={"type", "message"} if self._messages else None)

    def _error_event(self, error: VLLMError) -> bytes:
        info = _info(error)
        if self._messages:
            event = {"type": "error", "error": self._described(info)}
        else:
            event = {**info.model_dump(), "type": "error", "code": info.type}
            event["sequence_number"] = self._events - 1
        return b"event: error\ndata: %b\n\n" % json.dumps(event).encode()


def _info(error: VLLMError) -> ErrorInfo:
    return create_error_response(error).error


def _with_retry_after(head: Message) -> Message:
    """Clients that are refused for now are told to come back in a second."""
    if head["status"] not in _RETRYABLE:
        return head
    return {**head, "headers": [*head.get("headers", ()), (b"retry-after", b"1")]}


def _is_event_stream(head: Message) -> bool:
    return any(
        key.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for key, value in head.get("headers", ())
    )


#: Removed from the request: vLLM's app would log that it does not trace.
_HEADERS = (TRACEPARENT.encode(), b"tracestate")


def _trace_of(tracer: Tracer, scope: Scope) -> tuple[TraceContext, str] | None:
    """The span of a request, which begins a trace or continues a client's `traceparent`, and the id
    of the span above it; None for a request that is not traced. Removes trace headers from `scope`.
    """
    said = [value for key, value in scope["headers"] if key == _HEADERS[0]]
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _HEADERS]
    if scope["method"] != "POST":
        return None
    incoming = trace_of({TRACEPARENT: said[0].decode("latin-1")}) if len(said) == 1 else None
    context = tracer.begin(incoming)
    return None if context is None else (context, incoming.span_id if incoming else "")


def _record_span(
    tracer: Tracer, scope: Scope, context: TraceContext, parent: str, began: float, status: int
) -> None:
    """status: 0 without an answer."""
    # The route, not the path: clients can send any number of paths.
    route = getattr(scope.get("route"), "path", "")
    attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
    if status:
        attributes["http.response.status_code"] = status
    tracer.record(
        f"{scope['method']} {route}".rstrip(),
        context,
        parent,
        began,
        time.monotonic(),
        kind="server",
        attributes=attributes,
        error=f"status {status}" if status >= 500 else "",
    )
