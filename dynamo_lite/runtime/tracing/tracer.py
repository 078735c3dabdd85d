"""The interface of tracing: spans with their ids and times.

Ids are made here and not by a tracing library, because a span's context is sent before the
span has ended, from processes that do not import such a library. Times are of the monotonic
clock, which all processes of a host share. Without tracing there is no Tracer object.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from dynamo_lite.protocol.trace import TraceContext

SpanKindName = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float]

_GRPC_PORT = 4317


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    """Where spans are sent, and how many requests are traced."""

    #: URL of an OTLP collector, see `check_endpoint`.
    endpoint: str
    #: Share of the requests that are traced, 0 to 1. Requests with a client's own trace context
    #: follow the client's decision instead.
    ratio: float = 1.0


class Tracer(Protocol):
    """Used in the event loop of the process; never blocks."""

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        """The first span's context, a child of the client's if there is one. None: not traced."""
        ...

    def record(
        self,
        name: str,
        context: TraceContext,
        parent: str,
        start: float,
        end: float,
        *,
        kind: SpanKindName = "internal",
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Records an ended span.

        context: its own ids. parent: the parent span's id, "" without one. start, end: monotonic
        seconds. error: what went wrong, empty if nothing.
        """
        ...


@asynccontextmanager
async def open_tracer(
    options: TracingOptions, *, namespace: str, component: str, instance: str
) -> AsyncIterator[Tracer]:
    """Leaving the context sends the last spans, for a few seconds at most."""
    # Importing the SDK and its exporters takes a while, so only with tracing and in a thread.
    await asyncio.to_thread(__import__, "dynamo_lite.runtime.tracing.otlp")
    from dynamo_lite.runtime.tracing.otlp import OtlpTracer

    tracer = OtlpTracer(options, namespace=namespace, component=component, instance=instance)
    async with tracer:
        yield tracer


def record_child(
    tracer: Tracer,
    name: str,
    parent: TraceContext,
    start: float,
    end: float,
) -> None:
    """Records an ended span without children."""
    tracer.record(name, parent.child(), parent.span_id, start, end)


def record_notes(tracer: Tracer, notes: Sequence[Sequence[Any]]) -> None:
    """Records spans that were noted in an engine's processes; see `SpanNotes`."""
    for name, trace_id, span_id, parent, start, end, kind, attributes in notes:
        context = TraceContext(trace_id, span_id)
        tracer.record(name, context, parent, start, end, kind=kind, attributes=attributes)


def check_endpoint(url: str) -> str | None:
    """What is wrong with an endpoint; None when it is valid.

    `http[s]://HOST[:PORT][/PATH]`: OTLP over HTTP, at /v1/traces where no path is given.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        return f"{exc}, got {url!r}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
    if port == _GRPC_PORT:
        return f"{_GRPC_PORT} is the port for gRPC; name the one for HTTP, which is 4318 by default"
    if parts.username is not None or parts.query or parts.fragment:
        return "user names, queries and fragments are not supported; see OTEL_EXPORTER_OTLP_HEADERS"
    return None
