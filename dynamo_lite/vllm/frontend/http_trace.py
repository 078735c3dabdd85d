"""Spans of HTTP requests. They begin a trace, or continue a client's `traceparent`."""

import time

from starlette.types import Message, Scope, Send

from dynamo_lite.protocol.trace import TRACEPARENT, TraceContext, trace_of
from dynamo_lite.runtime.tracing.tracer import Tracer

#: Removed from the request: vLLM's app would log that it does not trace.
_HEADERS = (TRACEPARENT.encode(), b"tracestate")


class HttpTrace:
    """One traced request; the app must use its `send`."""

    def __init__(
        self, tracer: Tracer, scope: Scope, send: Send, context: TraceContext, parent: str
    ):
        self._tracer, self._scope, self._send = tracer, scope, send
        self._parent = parent
        self._began = time.monotonic()
        self._status = 0
        self.context = context

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def ended(self) -> None:
        """The answer is complete, or the client has disconnected."""
        scope, status = self._scope, self._status
        # The route, not the path: clients can send any number of paths.
        route = getattr(scope.get("route"), "path", "")
        attributes: dict[str, str | int] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        if status:
            attributes["http.response.status_code"] = status
        self._tracer.record(
            f"{scope['method']} {route}".rstrip(),
            self.context,
            self._parent,
            self._began,
            time.monotonic(),
            kind="server",
            attributes=attributes,
            error=f"status {status}" if status >= 500 else "",
        )


def trace_http(tracer: Tracer, scope: Scope, send: Send) -> HttpTrace | None:
    """Returns None for a request that is not traced. Removes trace headers from `scope`."""
    said = [value for key, value in scope["headers"] if key == _HEADERS[0]]
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _HEADERS]
    if scope["method"] != "POST":
        return None
    incoming = trace_of({TRACEPARENT: said[0].decode("latin-1")}) if len(said) == 1 else None
    context = tracer.begin(incoming)
    if context is None:
        return None
    return HttpTrace(tracer, scope, send, context, incoming.span_id if incoming else "")
