"""Sends spans to an OTLP collector with OpenTelemetry's SDK.

A thread of the SDK sends them in batches from a bounded queue. Spans that a slow or dead
collector does not accept are dropped. The SDK reads its own environment variables
(`OTEL_BSP_*`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, ...).
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from dynamo_lite import __version__
from dynamo_lite.protocol.trace import TraceContext, new_trace
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.tracing.tracer import Attributes, SpanKindName, TracingOptions

logger = logging.getLogger(__name__)

#: How long an exiting process waits until its last spans are sent.
_FLUSH_S = 3.0
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
#: These log every failed batch and every retry while a collector is unavailable.
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")


class _GivenIds(IdGenerator):
    """Gives ids that were chosen before. Used by one thread."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class OtlpTracer:
    """Implements Tracer. Async context manager. component, instance: the source of the spans."""

    def __init__(self, options: TracingOptions, *, namespace: str, component: str, instance: str):
        self._options = options
        self._resource = {
            "service.name": component,
            "service.namespace": namespace,
            "service.instance.id": instance,
            "service.version": __version__,
        }
        self._ids = _GivenIds()
        self._exporter: SpanExporter | None = None
        self._provider: TracerProvider | None = None

    async def __aenter__(self) -> Self:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        try:
            self._provider = provider = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close)  # a cancel does not end the thread that opens
            raise
        self._tracer = provider.get_tracer("dynamo_lite", __version__)
        return self

    async def __aexit__(self, *_: object) -> None:
        provider, self._provider = self._provider, None
        assert provider is not None
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            provider.shutdown()
            try:
                loop.call_soon_threadsafe(closed.set)
            except RuntimeError:  # the event loop is closed after the timeout
                pass

        # Daemon threads that are not joined: both may take longer than the timeout.
        threading.Thread(target=close, name="trace-flush", daemon=True).start()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await closed.wait()
        except (TimeoutError, asyncio.CancelledError) as exc:
            assert self._exporter is not None
            give_up = self._exporter.shutdown
            threading.Thread(target=give_up, name="trace-give-up", daemon=True).start()
            if isinstance(exc, asyncio.CancelledError):
                raise

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        if incoming is not None:
            return incoming.child() if incoming.sampled else None
        return new_trace() if random.random() < self._options.ratio else None

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
        if self._provider is None:
            return
        # Computed for each span, as the wall clock may be set.
        offset = time.time() - time.monotonic()
        ids = self._ids
        ids.trace_id, ids.span_id = int(context.trace_id, 16), int(context.span_id, 16)
        above = None
        if parent:
            remote = SpanContext(
                ids.trace_id, int(parent, 16), is_remote=True, trace_flags=_SAMPLED
            )
            above = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(
            name,
            context=above,
            kind=_KINDS[kind],
            attributes=attributes,
            start_time=_nanoseconds(start + offset),
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(max(start, end) + offset))

    def _open(self) -> TracerProvider:
        """Runs in a thread."""
        provider = TracerProvider(
            resource=Resource.create(self._resource),
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._exporter = _LoggingExporter(_exporter(self._options))
        provider.add_span_processor(BatchSpanProcessor(self._exporter))
        return provider


def _close(opening: asyncio.Future[TracerProvider]) -> None:
    if opening.exception() is None:
        close = opening.result().shutdown
        threading.Thread(target=close, name="trace-close", daemon=True).start()


class _LoggingExporter(SpanExporter):
    """Logs failures of an exporter, at a limited rate."""

    def __init__(self, exporter: SpanExporter):
        self._exporter, self._limit = exporter, LogLimit()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS and self._limit.allow() is not None:
            logger.warning("%d spans are lost: the OTLP collector does not accept them", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _exporter(options: TracingOptions) -> SpanExporter:
    parts = urlsplit(options.endpoint)
    if parts.path in ("", "/"):
        parts = parts._replace(path="/v1/traces")
    return OTLPSpanExporter(endpoint=parts.geturl())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
