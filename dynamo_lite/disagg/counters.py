"""Counters of a scheduler or worker half, collected for the next step, and added to their metrics.

A half adds to a small dictionary. The engine carries it to its component with the
statistics of the same step, in order and without loss. Spans go the same way, as short lists: the
engine's processes have no tracing library.
"""

import threading
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from dynamo_lite.disagg.metrics import METRICS, STAGE
from dynamo_lite.protocol.generate import PrefillCounts
from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tracing import Attributes

# Names of what is no metric of its own.
DROPPED = "dropped"  # + "/where": see `runtime/drops.py`
BROKEN_LINK = "broken_link"  # a list of [decode engine, why a transfer with it failed]
SPAN = "span"  # a list of spans: see `note_span`
ENDED = "ended"  # a list of [attempt, outcome, detail]: see `AttemptOutcome`


class Counters:
    """Any thread may add to it."""

    def __init__(self) -> None:
        #: By name: a number, or a list of values.
        self.data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self.data[name] = self.data.get(name, 0) + amount

    def append(self, name: str, value: Any) -> None:
        with self._lock:
            self.data.setdefault(name, []).append(value)

    def drop(self, where: str, messages: int = 1) -> None:
        """Counts dropped messages; an `OnDrop`."""
        self.add(f"{DROPPED}/{where}", messages)

    def add_stage(self, stage: str, seconds: float) -> None:
        self.append(f"{STAGE}/{stage}", seconds)

    def take(self) -> dict[str, Any]:
        """Returns what was collected since the last call."""
        with self._lock:
            taken, self.data = self.data, {}
        return taken


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


class RemotePrefillMetrics:
    """At most one per registry.

    on_drop: called for each message that the engine's processes have dropped.
    """

    def __init__(self, registry: CollectorRegistry, on_drop: OnDrop = uncounted):
        self._on_drop = on_drop
        self._metrics = {name: make(registry=registry) for name, make in METRICS.items()}

    def apply(self, data: Mapping[str, Any]) -> None:
        """Adds the counters of one step. Unknown names are ignored."""
        for name, value in data.items():
            counter, _, labels = name.partition("/")
            if counter == DROPPED:
                for _ in range(int(value)):
                    self._on_drop(labels)
            elif (metric := self._metrics.get(counter)) is not None:
                child = metric.labels(*labels.split("/")) if labels else metric
                if isinstance(child, Histogram):
                    for seconds in value:
                        child.observe(seconds)
                else:
                    child.inc(value)

    def first_token(self, counts: PrefillCounts) -> None:
        """Counts the time to a prompt's first token if its KV came from a prefill worker."""
        if counts.external_cached_tokens:
            self.apply({f"{STAGE}/first_token": [counts.prefill_s]})
