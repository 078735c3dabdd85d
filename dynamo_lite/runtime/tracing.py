"""Tracing: spans with their ids and times, which OpenTelemetry's SDK sends to an OTLP collector.

Ids are made here and not by the SDK, because a span's context is sent before the span has ended,
from processes that do not import it. Times are of the monotonic clock, which all processes of a
host share. Without tracing there is no Tracer object, and the SDK is not imported.

A thread of the SDK sends spans in batches from a bounded queue. Spans that a slow or dead
collector does not accept are dropped. The SDK reads its own environment variables
(`OTEL_BSP_*`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, ...).
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from dynamo_lite import __version__
from dynamo_lite.protocol.trace import TraceContext, new_trace
from dynamo_lite.runtime.log_limit import LogLimit

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

SpanKindName = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float]

_GRPC_PORT = 4317
#: How long an exiting process waits until its last spans are sent.
_FLUSH_S = 3.0
#: These log every failed batch and every retry while a collector is unavailable.
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    """Where spans are sent, and how many requests are traced."""

    #: URL of an OTLP collector, see `check_endpoint`.
    endpoint: str
    #: Share of the requests that are traced, 0 to 1. Requests with a client's own trace context
    #: follow the client's decision instead.
    ratio: float = 1.0


class Tracer:
    """Used in the event loop of the process; never blocks. `open_tracer` makes it.

    resource: the source of the spans. send: takes an ended span.
    """

    def __init__(self, ratio: float, resource: "Resource", send: "Callable[[ReadableSpan], None]"):
        self._ratio, self._resource, self._send = ratio, resource, send

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        """The first span's context, a child of the client's if there is one. None: not traced."""
        if incoming is not None:
            return incoming.child() if incoming.sampled else None
        return new_trace() if random.random() < self._ratio else None

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
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def ids(span_id: str, *, is_remote: bool) -> SpanContext:
            trace_id, flags = int(context.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(trace_id, int(span_id, 16), is_remote, flags)

        offset = time.time() - time.monotonic()  # as it is now: the wall clock may be set
        self._send(
            ReadableSpan(
                name,
                context=ids(context.span_id, is_remote=False),
                parent=ids(parent, is_remote=True) if parent else None,
                resource=self._resource,
                attributes=attributes,
                kind=SpanKind[kind.upper()],
                status=Status(StatusCode.ERROR, error) if error else Status(),
                start_time=int((start + offset) * 1e9),
                end_time=int((max(start, end) + offset) * 1e9),
                instrumentation_scope=InstrumentationScope("dynamo_lite", __version__),
            )
        )

    def record_child(self, name: str, parent: TraceContext, start: float, end: float) -> None:
        """Records an ended span without children."""
        self.record(name, parent.child(), parent.span_id, start, end)

    def record_notes(self, notes: Sequence[Sequence[Any]]) -> None:
        """Records spans that were noted in an engine's processes; see `note_span`."""
        for name, trace_id, span_id, parent, start, end, kind, attributes in notes:
            context = TraceContext(trace_id, span_id)
            self.record(name, context, parent, start, end, kind=kind, attributes=attributes)


@asynccontextmanager
async def open_tracer(
    options: TracingOptions | None, namespace: str, component: str, *, instance: str
) -> AsyncIterator[Tracer | None]:
    """None without options. Leaving the context sends the last spans, for a few seconds at most."""
    if options is None:
        yield None
        return
    source = {
        "service.name": component,
        "service.namespace": namespace,
        "service.instance.id": instance,
        "service.version": __version__,
    }
    resource, exporter = await asyncio.to_thread(_load, options, source)
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    processor = BatchSpanProcessor(exporter)
    try:
        yield Tracer(options.ratio, resource, processor.on_end)
    finally:
        # It may take longer than the timeout: a daemon thread, which no exit waits for.
        flush = threading.Thread(target=processor.shutdown, name="trace-flush", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, _FLUSH_S)
        if flush.is_alive():  # this ends its retries
            threading.Thread(target=exporter.shutdown, name="trace-give-up", daemon=True).start()


def _load(options: TracingOptions, source: dict[str, str]) -> "tuple[Resource, SpanExporter]":
    """Runs in a thread: importing the SDK and its exporter takes a while."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Exporter(OTLPSpanExporter):
        _limit = LogLimit()

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = super().export(spans)
            if result is not SpanExportResult.SUCCESS:
                text = "%d spans are lost: the OTLP collector does not accept them"
                self._limit.log(logger, text, len(spans))
            return result

    parts = urlsplit(options.endpoint)
    if parts.path in ("", "/"):
        parts = parts._replace(path="/v1/traces")
    return Resource.create(source), Exporter(endpoint=parts.geturl())


def check_endpoint(url: str) -> str | None:
    """What is wrong with an endpoint; None when it is valid.

    `http[s]://HOST[:PORT][/PATH]`: OTLP over HTTP, at /v1/traces where no path is given.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        return f"expected http://HOST:PORT or https://HOST:PORT: {exc}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
    if port == _GRPC_PORT:
        return f"{_GRPC_PORT} is the port for gRPC; name the one for HTTP, which is 4318 by default"
    if parts.username is not None or parts.query or parts.fragment:
        return "user names, queries and fragments are not supported; see OTEL_EXPORTER_OTLP_HEADERS"
    return None
