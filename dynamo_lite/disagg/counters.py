"""Counters of a scheduler or worker half, collected for the next step.

A half adds to a small dictionary. The engine carries it to its component with the
statistics of the same step, in order and without loss. Spans go the same way, as short lists: the
engine's processes have no tracing library.
"""

import threading
from typing import Any

from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.tracing import Attributes

DECISION = "decision"  # + "/verdict/reason"
ASKED = "asked_tokens"  # prompt tokens that remote prefills have to compute
OVERFLOW = "overflow_tokens"  # uncached tokens of prompts that found no room, or no queue
REMOTE = "remote"  # + "/outcome"
BYTES = "bytes"
DESCRIPTORS = "descriptors"
SECONDS = "seconds"  # a list of durations
STAGE = "stage"  # + "/stage": a list of durations
LATE = "late_notices"
STOPPED = "stopped_writes"
MISMATCH = "commit_mismatches"
DROPPED = "dropped"  # + "/where": see `runtime/drops.py`
FLIGHT_WAIT = "single_flight"  # + "/outcome": hit, miss, cancelled
PREFIX_READ = "prefix_read"  # + "/outcome": read, failed
PREFIX_BYTES = "prefix_bytes"
COMPUTED = "computed_tokens"  # tokens that a prefill engine computed for its jobs
RESUME = "resume"  # + "/reason" of the verdict when a writer was lost
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
