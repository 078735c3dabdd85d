"""What of requests is traced, and how spans are told: with their ids and their times.

Ids are made here and not by a tracing library, because a span's context travels before
the span is over, from processes that have no such library loaded. Times are the
monotonic clock's, which all processes of a host share. Where tracing is off there is no
Tracer, and nothing is built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from dynamo_lite.protocol.trace import TraceContext

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | bool | int | float]

_GRPC_PORT = 4317


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    """endpoint: URL of an OTLP collector, see `check_endpoint`. ratio: share of the traces
    that begin here; a client that brings one of its own has decided itself."""

    endpoint: str
    ratio: float = 1.0

    @property
    def grpc(self) -> bool:
        return urlsplit(self.endpoint).port == _GRPC_PORT


class Tracer(Protocol):
    """Used on the event loop of the process; never blocks."""

    def begin(self, incoming: TraceContext | None) -> TraceContext | None:
        """The first span of this graph, below what a client brings. None: not traced."""
        ...

    def record(
        self,
        name: str,
        context: TraceContext,
        parent: str,
        start: float,
        end: float,
        *,
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """A span that is over. context: its own; parent: the id of the span above, "" where
        there is none. start, end: monotonic seconds. error: what went wrong."""
        ...


def record_child(
    tracer: Tracer,
    name: str,
    parent: TraceContext,
    start: float,
    end: float,
    attributes: Attributes | None = None,
) -> None:
    """A span that nobody below needs to know."""
    tracer.record(name, parent.child(), parent.span_id, start, end, attributes=attributes)


def record_notes(tracer: Tracer, notes: Sequence[Sequence[Any]]) -> None:
    """Spans that an engine's processes have noted; see `SpanNotes`."""
    for name, trace_id, span_id, parent, start, end, kind, attributes in notes:
        context = TraceContext(trace_id, span_id)
        tracer.record(name, context, parent, start, end, kind=kind, attributes=attributes)


def check_endpoint(url: str) -> str | None:
    """What is wrong with an endpoint; None where it can be used.

    `http[s]://HOST[:PORT][/PATH]`: OTLP over gRPC at port 4317, else over HTTP, at
    /v1/traces where no path is given.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        return f"{exc}, got {url!r}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
    if parts.username is not None or parts.query or parts.fragment:
        return "user names, queries and fragments are not taken; see OTEL_EXPORTER_OTLP_HEADERS"
    return None
