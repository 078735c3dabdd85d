"""Notes of spans, which an engine's process sends to its component.

The engine's processes have no tracing library. A note is a short list among the counters.
"""

from dynamo_lite.disagg.counters import SPAN, Counters
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.tracing import Attributes


def note_span(
    stats: Counters,
    name: str,
    context: TraceContext,
    parent: str,
    start: float,
    end: float,
    *,
    attributes: Attributes | None = None,
) -> None:
    """As `Tracer.record` of an internal span, by this host's monotonic clock. Any thread."""
    ids = (context.trace_id, context.span_id, parent)
    stats.append(SPAN, [name, *ids, start, max(start, end), "internal", dict(attributes or {})])


def note_child(
    stats: Counters,
    name: str,
    parent: TraceContext,
    start: float,
    end: float,
    attributes: Attributes | None = None,
) -> None:
    """As `Tracer.record_child`."""
    note_span(stats, name, parent.child(), parent.span_id, start, end, attributes=attributes)
