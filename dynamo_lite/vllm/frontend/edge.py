"""The HTTP middleware around vLLM's app: timeouts, sessions and `Retry-After`.

It reads the headers `x-request-timeout`, `x-session-id` and `traceparent`, sets the deadline that
all sequences of one HTTP request share, adds `Retry-After`, gives a stream that fails before its
first output the status of its error, and ends a later one of `/v1/responses` and `/v1/messages`
with an error event
(https://docs.anthropic.com/en/docs/build-with-claude/streaming#error-events).
"""

import asyncio
import math
from contextvars import ContextVar
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import VLLMError, VLLMValidationError

from dynamo_lite.protocol.trace import TRACEPARENT, TraceContext, trace_of
from dynamo_lite.vllm.frontend.refusal import TIMEOUT_HEADER, error_event, refuse
from dynamo_lite.vllm.frontend.request_context import MAX_SESSION, RequestContext

SESSION_HEADER = "x-session-id"

#: A retry may succeed after these.
_RETRYABLE = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
#: Events that come before any output.
_NO_OUTPUT = (b"event: response.created\n", b"event: response.in_progress\n")


#: Inherited by the tasks that the app starts for a request.
_context: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current_context() -> RequestContext | None:
    """Returns the HTTP request of the running task; None outside of one."""
    return _context.get()


class Edge:
    """ASGI middleware.

    default_timeout_s: timeout of a request without the header. max_timeout_s: upper limit on
    the header.
    """

    def __init__(self, app: ASGIApp, *, default_timeout_s: float, max_timeout_s: float):
        self._app = app
        self._default_timeout_s = min(default_timeout_s, max_timeout_s)
        self._max_timeout_s = max_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        now, headers = asyncio.get_running_loop().time(), Headers(scope=scope)
        try:
            timeout_s = self._timeout_s(headers.get(TIMEOUT_HEADER))
        except VLLMValidationError as exc:
            return await refuse(send, exc)
        session = headers.get(SESSION_HEADER, "")[:MAX_SESSION] or None
        context = RequestContext(
            timeout_s, deadline=now + timeout_s, session=session, trace=_trace_of(scope)
        )
        answer = _Answer(send, context)
        token = _context.set(context)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if context.error is None or not answer.streams:
                raise
            await answer.fail(context.error)
        finally:
            _context.reset(token)

    def _timeout_s(self, text: str | None) -> float:
        """text: the header. Raises VLLMValidationError."""
        if text is None:
            return self._default_timeout_s
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise VLLMValidationError(
                f"expected seconds as a number greater than 0, got {text!r}",
                parameter=TIMEOUT_HEADER,
            )
        return min(timeout_s, self._max_timeout_s)


class _Answer:
    """Sends the app's answer.

    The head of an event stream waits for the first event with output. If the request fails before
    it, the answer becomes the error with its status.
    """

    def __init__(self, send: Send, context: RequestContext):
        self._send, self._context = send, context
        #: The head and the first events of a stream, while they wait.
        self._held: list[Message] = []
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
            if error is not None:
                return await self.fail(error)
            # A client asks for a background response by the id in its first event.
            silent = body.startswith(_NO_OUTPUT) and b'"background":true' not in body
            if message.get("more_body", False) and (silent or not body):
                return self._held.append(message)
            held, self._held = self._held, []
            for one in held:
                await self._send(one)
        # vLLM does not know our errors as events of /v1/messages.
        if error is not None and body.startswith(b"event: error"):
            message = {**message, "body": error_event(error)}
        await self._send(message)

    async def fail(self, error: VLLMError) -> None:
        """The request has failed in an event stream: the error in the place of the stream, or as
        its last event."""
        if not self._held:
            return await self._send({"type": "http.response.body", "body": error_event(error)})
        head, self._held = self._held[0], []
        await refuse(self.send, error, head.get("headers", ()))
        self._replaced = True


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
_TRACE_HEADERS = (TRACEPARENT.encode(), b"tracestate")


def _trace_of(scope: Scope) -> TraceContext | None:
    """The client's span, from its only `traceparent`. Removes trace headers from `scope`."""
    said = [value for key, value in scope["headers"] if key == _TRACE_HEADERS[0]]
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _TRACE_HEADERS]
    return trace_of({TRACEPARENT: said[0].decode("latin-1")}) if len(said) == 1 else None
