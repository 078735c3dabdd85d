"""HTTP requests as spans: where a trace begins, or goes on from a client's `traceparent`."""

import time

from starlette.types import Message, Scope, Send

from dynamo_lite.protocol.trace import TRACEPARENT, TraceContext, trace_of
from dynamo_lite.runtime.tracing.tracer import Tracer

#: Ours to read. vLLM's app would say in its log that it does not trace.
_HEADERS = (TRACEPARENT.encode(), b"tracestate")


class HttpTrace:
    """One request; `send` stands in front of its server's."""

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
        """The answer is out, or the client has left."""
        scope, status = self._scope, self._status
        # The path as the app knows it: clients can make up any number of others.
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
    """None for what is not traced. Takes trace headers out of `scope`."""
    said = [value for key, value in scope["headers"] if key == _HEADERS[0]]
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in _HEADERS]
    if scope["method"] != "POST":
        return None
    incoming = trace_of({TRACEPARENT: said[0].decode("latin-1")}) if len(said) == 1 else None
    context = tracer.begin(incoming)
    if context is None:
        return None
    return HttpTrace(tracer, scope, send, context, incoming.span_id if incoming else "")
